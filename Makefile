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

BENCHES ?= warm cold mixed hash storage step
BENCH_ARGS ?=
PYTEST_ARGS ?=
SOAK_ARGS ?=
KILL_ARGS ?=
FIGURES_ARGS ?=
MANYLINUX ?= manylinux2014
FUZZ_TARGETS ?= header index plan ids
FUZZ_SECONDS ?= 60

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
test-gpu: $(PLAIN) $(DEV) ## Test what needs a CUDA device; without one every test is skipped (at most 4 minutes).
	timeout --foreground --signal=INT --kill-after=15 240 \
		$(BIN)/python -m pytest tests/gpu $(PYTEST_ARGS)

.PHONY: soak
soak: $(PLAIN) $(DEV) ## Ten minutes of crowds and faults at random; SOAK_ARGS="--seconds 60 --seed 7".
	$(BIN)/python tests/soak.py $(SOAK_ARGS)

.PHONY: kill-replicas
kill-replicas: $(PLAIN) $(DEV) ## Kill ranks that share a table, 200 times; KILL_ARGS="--kills 50 --seed 7".
	$(BIN)/python tests/storage/kill_replicas.py $(KILL_ARGS)

# RUSTC_BOOTSTRAP lets the stable toolchain take the flags that sanitizers need.
.PHONY: fuzz
fuzz: ## Fuzz header, index, plan and ids with AddressSanitizer; FUZZ_SECONDS=60 is for each.
	export PATH="$(CURDIR)/target/tools/bin:$$PATH"; \
	cargo fuzz --version >/dev/null 2>&1 \
		|| cargo install --locked --root target/tools cargo-fuzz; \
	for name in $(FUZZ_TARGETS); do \
		echo "== $$name"; \
		mkdir -p fuzz/found/$$name; \
		RUSTC_BOOTSTRAP=1 cargo fuzz run --fuzz-dir fuzz --target-dir target/fuzz $$name \
			fuzz/found/$$name fuzz/corpus/$$name -- -dict=fuzz/json.dict \
			-max_total_time=$(FUZZ_SECONDS) -max_len=8192 -rss_limit_mb=2048; \
	done

HOST = $(shell rustc -vV | sed -n 's/^host: //p')

.PHONY: asan tsan
asan: ## Test the core under AddressSanitizer and LeakSanitizer.
	RUSTC_BOOTSTRAP=1 RUSTFLAGS=-Zsanitizer=address \
	LSAN_OPTIONS=suppressions=$(CURDIR)/rust/sanitizers/leaks.txt \
	cargo test --locked -p engram-core --lib --tests --target $(HOST) --target-dir target/asan

# The standard library comes as it is, uninstrumented: building it anew needs its source, which is no
# part of the stable toolchain. Threads that meet through its locks, channels and parking therefore look
# like races. What is left to judge are the modules whose threads meet in engram's own atomics.
TSAN_MODULES ?= latency residency buffer map:: file:: hash::

tsan: ## Test the core's lock-free modules under ThreadSanitizer.
	RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=thread -Cunsafe-allow-abi-mismatch=sanitizer" \
	TSAN_OPTIONS=suppressions=$(CURDIR)/rust/sanitizers/races.txt \
	cargo test --locked -p engram-core --lib --target $(HOST) --target-dir target/tsan \
		-- $(TSAN_MODULES)

.PHONY: lint lint-rust lint-python lint-types
lint: lint-rust lint-python lint-types ## Formatting, lints and types, warnings being errors (-k: all of them).

lint-rust:
	cargo fmt --all --check
	cargo fmt --manifest-path fuzz/Cargo.toml --check
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

.PHONY: endure
endure: $(BENCH) $(BENCH_NEEDS) ## Keep a cache of rows to its budget for two hours; BENCH_ARGS="--seconds 600".
	$(BIN)/python benches/endure.py $(BENCH_ARGS)

.PHONY: wheel
wheel: $(VENV)/.tools $(VENV)/.audit ## Build the wheel into dist/, audit it, and try it without torch.
	rm -f dist/*.whl
	PATH=$(CURDIR)/$(BIN):$$PATH $(MATURIN) build --release --locked --zig \
		--compatibility $(MANYLINUX) --target-dir target/wheel --out dist
	$(BIN)/auditwheel show dist/*.whl
	$(BIN)/python .ci/check_wheel.py dist

.PHONY: sdist
sdist: $(VENV)/.tools ## Build the source archive into dist/, crates included, and build it without a network.
	$(BIN)/python .ci/sdist.py dist

.PHONY: docs
docs: $(PLAIN) $(VENV)/.docs ## Build the documentation into site/; warnings are errors.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python .ci/check_reference.py site

.PHONY: figures
figures: $(BENCH) $(BENCH_NEEDS) ## Measure the figures of the documentation; FIGURES_ARGS="warm -- --quick".
	$(BIN)/python benches/figures.py $(FIGURES_ARGS)

.PHONY: walk
walk: wheel ## Follow README and documentation with the wheel in an empty environment.
	$(BIN)/python .ci/walk.py dist

.PHONY: portable
portable: ## Test the core as on a system without io_uring, and compile for others where rustup has them.
	cargo test --locked -p engram-core --features portable
	.ci/other_systems

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

$(VENV)/.docs: $(VENV)/.tools pyproject.toml
	$(BIN)/python -m pip install --progress-bar off $$($(BIN)/python .ci/requirements.py docs)
	touch $@

# zig links against the oldest C library that the wheel is to run with.
$(VENV)/.audit: $(VENV)/.tools pyproject.toml
	$(BIN)/python -m pip install --progress-bar off $$($(BIN)/python .ci/requirements.py wheel)
	touch $@

$(BENCH_NEEDS): $(VENV)/.tools pyproject.toml
	$(BIN)/python -m pip install --progress-bar off $$($(BIN)/python .ci/requirements.py bench)
	touch $@

ifeq ($(wildcard python/engram/_engram*.so),)
.PHONY: $(PLAIN) $(BENCH)
endif
