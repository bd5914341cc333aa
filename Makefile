# `make demo` and `make test` each work alone in a fresh clone that finds cargo, make and Python.
# Everything they install goes into .venv, and a second run installs nothing again.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c

# Any Python from 3.11 on makes the environment; `make test PYTHON=/usr/bin/python3.13` chooses one.
PYTHON ?= $(shell for candidate in python3.11 python3 python3.12 python3.13 python3.14; do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo $$candidate && break; done)

VENV := .venv
BIN := $(VENV)/bin
# maturin builds into the environment that VIRTUAL_ENV names.
MATURIN := VIRTUAL_ENV=$(CURDIR)/$(VENV) $(BIN)/maturin
export PIP_DISABLE_PIP_VERSION_CHECK := 1

BENCHES ?= warm cold mixed hash storage
BENCH_ARGS ?=
PYTEST_ARGS ?=
SOAK_ARGS ?=

RUST_SOURCES := Cargo.toml Cargo.lock pyproject.toml \
	$(shell find rust -name '*.rs' -o -name 'Cargo.toml')

# What is in the environment. One extension is built at a time: `plain` as users get it, `bench` with
# the loops that benchmarks compare against; each forgets the other.
PLAIN := $(VENV)/.plain
BENCH := $(VENV)/.bench
DEV := $(VENV)/.dev
BENCH_NEEDS := $(VENV)/.bench-needs

.PHONY: help
help: ## List these targets.
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

.PHONY: demo
demo: $(PLAIN) ## Write a 1 GiB checkpoint, gather from it, check every row, compare (torch too, if there).
	$(BIN)/engram demo

.PHONY: test
test: $(PLAIN) $(DEV) ## Test the core, then the Python package.
	cargo test --locked -p engram-core --features bench
	$(BIN)/python -m pytest $(PYTEST_ARGS)

.PHONY: test-gpu
test-gpu: $(PLAIN) $(DEV) ## Test what needs a CUDA device; without one every test is skipped.
	$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

.PHONY: soak
soak: $(PLAIN) $(DEV) ## Ten minutes of crowds and faults at random; SOAK_ARGS="--seconds 60 --seed 7".
	$(BIN)/python tests/soak.py $(SOAK_ARGS)

.PHONY: lint lint-rust lint-python lint-types
lint: lint-rust lint-python lint-types ## Formatting, lints and types, warnings being errors (-k: all of them).

lint-rust:
	cargo fmt --all --check
	cargo clippy --locked --workspace --all-targets -- -D warnings
	cargo clippy --locked --workspace --all-targets --features bench -- -D warnings

lint-python: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint-types: $(PLAIN) $(DEV)
	$(BIN)/pyright --warnings --pythonpath $(BIN)/python
	$(BIN)/python -m mypy.stubtest engram._engram --allowlist tests/stubtest_allowlist.txt

.PHONY: format
format: $(DEV) ## Format Rust and Python, and fix what can be fixed.
	cargo fmt --all
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: bench
bench: $(BENCH) $(BENCH_NEEDS) ## Run the benchmarks; BENCHES="warm hash" chooses, BENCH_ARGS reaches each.
	status=0; \
	for name in $(BENCHES); do \
		if [ -e benches/$$name.py ]; then \
			echo "== benches/$$name.py"; \
			$(BIN)/python benches/$$name.py $(BENCH_ARGS) || status=1; \
		fi; \
	done; \
	exit $$status

.PHONY: bench-budget
bench-budget: $(BENCH) $(BENCH_NEEDS) ## Serve text in a sixteenth of the table's memory, by rows or pages (half an hour).
	$(BIN)/python benches/budget.py $(BENCH_ARGS)

.PHONY: wheel
wheel: $(VENV)/.tools ## Build the wheel into dist/, and try it in an empty environment without torch.
	rm -f dist/*.whl
	$(MATURIN) build --release --locked --out dist
	$(BIN)/python .ci/check_wheel.py dist

.PHONY: build
build: $(PLAIN) ## Build the extension and install the package, editable, with its command line.

.PHONY: clean
clean: ## Remove the environment and everything that was built.
	rm -rf $(VENV) target dist
	rm -f python/engram/_engram*.so

# Debian's Python can be without ensurepip; a pip that is there can then serve the environment.
$(VENV)/.made:
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found; set PYTHON=" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV) || { \
		$(PYTHON) -m venv --without-pip --clear $(VENV) && \
		$(PYTHON) -m pip --python $(BIN)/python install pip; }
	touch $@

$(VENV)/.tools: $(VENV)/.made pyproject.toml
	$(BIN)/python -m pip install --quiet $$($(BIN)/python .ci/requirements.py build)
	touch $@

$(PLAIN): $(VENV)/.tools $(RUST_SOURCES)
	$(MATURIN) develop --release --locked --extras cli
	rm -f $(BENCH)
	touch $@

# A target folder of its own, so that going back and forth costs a copy, not a build.
$(BENCH): $(VENV)/.tools $(RUST_SOURCES)
	$(MATURIN) develop --release --locked --extras cli --features bench --target-dir target/bench
	rm -f $(PLAIN)
	touch $@

# What the package needs is read from pyproject.toml alone, so this waits for no build.
$(DEV): $(VENV)/.tools pyproject.toml
	$(BIN)/python -m pip install --progress-bar off $$($(BIN)/python .ci/requirements.py dev)
	touch $@

$(BENCH_NEEDS): $(VENV)/.tools pyproject.toml
	$(BIN)/python -m pip install --progress-bar off $$($(BIN)/python .ci/requirements.py bench)
	touch $@

ifeq ($(wildcard python/engram/_engram*.so),)
.PHONY: $(PLAIN) $(BENCH)
endif
