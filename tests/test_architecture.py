"""Which way the arrows point, where unsafe code is, and how long a file may be."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import engram

ROOT = Path(__file__).parent.parent
CORE = ROOT / "rust" / "core" / "src"
BINDING = ROOT / "rust" / "python" / "src"
PYTHON = ROOT / "python" / "engram"

# fmt: off
CORE_ORDER = [
    "error", "words", "system", "latency", "cgroup", "primes", "maps",
    "header", "checkpoint", "table", "discover",
    "plan",
    "process", "threads", "crew", "fault", "buffer", "map", "copy", "residency",
    "filesystem", "file",
    "fetch", "mode", "cuts", "trim", "stats", "in_flight", "cache", "reader",
    "views", "load",
    "reread", "gather", "hot", "verify", "warm", "hosted",
    "schedule", "ticket",
    "hash", "step",
    "probe", "bench",
]
"""The core's modules as a row meets them. A module imports only modules that stand before it."""

BINDING_ORDER = [
    "errors", "interrupts", "gate", "table", "stats", "verification", "buffer", "array",
    "hash", "news", "gather", "many", "ticket", "step", "hosted", "views", "diagnosis", "bench",
]
"""The same for the binding, which may import all of the core."""

PYTHON_ORDER = [
    "_engram", "_errors", "_files", "_locks", "_notices", "_dtypes", "_arguments", "_sizes",
    "_topology",
    "pagecache",
    "table", "_arrays", "rows", "pinning", "buffer", "_targets", "_views", "verification", "ticket",
    "gather", "table_set", "views", "metrics",
    "quant", "hashing",
    "model_config", "config", "collective", "parallel", "exchange", "storage",
    "lookahead", "copier", "stagetables", "slots", "graphwait", "latewatch", "late", "staging",
    "embedding", "integrations",
    "synth",
    "cli", "__main__",
]
"""The same for the package. What a type checker alone imports does not count."""
# fmt: on

UNSAFE = {
    "core/buffer.rs",
    "core/cache/memory.rs",
    "core/copy.rs",
    "core/crew.rs",
    "core/fault.rs",
    "core/fault/handlers.rs",
    "core/fetch/uring.rs",
    "core/map.rs",
    "core/system/linux.rs",
    "core/system/portable.rs",
    "core/words.rs",
    "core/bench.rs",
    "python/array.rs",
    "python/buffer.rs",
}
"""Files that may hold unsafe code; `bench.rs` is in no wheel."""

NOT_WITH_ENGRAM = {"torch", "pydantic", "typer", "rich", "transformers", "tokenizers"}
"""Packages that `import engram` must not import."""

LONGEST_FILE = 500
"""Lines; a longer file is two."""

needs_sources = pytest.mark.skipif(not CORE.exists(), reason="not a checkout of the project")


def rust_code(path: Path) -> str:
    """The source without comments and without what is only compiled for tests."""
    text = re.sub(r"(?m)^\s*//.*$", "", path.read_text())
    return re.split(r"#\[cfg\(test\)\]\s*mod \w+ \{", text)[0]


def is_test(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).with_suffix("").parts
    return "tests" in parts or "testing" in parts


def rust_imports(root: Path) -> dict[str, set[str]]:
    """Top-level modules, each with those that it names by `crate::`."""
    found: dict[str, set[str]] = {}
    for path in sorted(root.rglob("*.rs")):
        module = path.relative_to(root).with_suffix("").parts[0]
        if module == "lib" or is_test(path, root):
            continue
        code = rust_code(path)
        names = set(re.findall(r"\bcrate::(\w+)", code))
        for group in re.findall(r"\bcrate::\{([^}]*)\}", code):
            names.update(re.findall(r"(?:^|,)\s*(\w+)", group))
        found.setdefault(module, set()).update(names - {module})
    return found


def wrong_arrows(imports: dict[str, set[str]], order: list[str]) -> list[str]:
    place = {name: number for number, name in enumerate(order)}
    wrong = [f"{name} has no place in the order" for name in imports if name not in place]
    for name, used in imports.items():
        for other in sorted(used):
            if other not in place:
                wrong.append(f"{name} imports {other}, which has no place in the order")
            elif name in place and place[other] >= place[name]:
                wrong.append(f"{name} imports {other}, which comes after it")
    return wrong


@needs_sources
def test_arrows_of_the_core_point_one_way():
    imports = rust_imports(CORE)
    assert len(imports) > 15
    assert "checkpoint" in imports["reader"], "imports are found"
    assert wrong_arrows(imports, CORE_ORDER) == []
    assert set(CORE_ORDER) == set(imports), "the order names every module and no other"


@needs_sources
def test_arrows_of_the_binding_point_one_way():
    imports = rust_imports(BINDING)
    assert "buffer" in imports["gather"]
    assert wrong_arrows(imports, BINDING_ORDER) == []


@needs_sources
def test_the_core_knows_nothing_of_python():
    for path in [*CORE.rglob("*.rs"), CORE.parent / "Cargo.toml"]:
        assert "pyo3" not in path.read_text().lower(), path


def test_wrong_arrows_are_seen():
    order = ["a", "b", "c"]
    assert wrong_arrows({"b": {"a"}, "c": {"a", "b"}}, order) == []
    assert wrong_arrows({"a": {"b"}}, order) == ["a imports b, which comes after it"]
    assert len(wrong_arrows({"d": {"a"}, "c": {"e"}}, order)) == 2


class Imports(ast.NodeVisitor):
    """Modules that a module imports when it is loaded, and when its functions run."""

    def __init__(self, package: tuple[str, ...]) -> None:
        self.package = package
        self.depth = 0
        self.on_load: set[str] = set()
        self.later: set[str] = set()

    def add(self, name: str) -> None:
        (self.later if self.depth else self.on_load).add(name)

    def visit_If(self, node: ast.If) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = node.module or ""
        if node.level:
            package = self.package[: len(self.package) - node.level + 1]
            base = ".".join((*package, base)).rstrip(".")
        for alias in node.names:
            self.add(f"{base}.{alias.name}" if base == "engram" else base)


def python_imports() -> dict[str, Imports]:
    """Every module of the package below its root, by dotted name."""
    found = {}
    for path in sorted(PYTHON.rglob("*.py")):
        parts = path.relative_to(PYTHON.parent).with_suffix("").parts
        visitor = Imports(parts[:-1])
        visitor.visit(ast.parse(path.read_text()))
        found[".".join(part for part in parts if part != "__init__")] = visitor
    return found


def top(name: str) -> str:
    """The module of the package that a dotted name lies in; "" for the package itself."""
    return name.split(".")[1] if "." in name else ""


def test_arrows_of_the_package_point_one_way():
    imports: dict[str, set[str]] = {}
    for name, found in python_imports().items():
        if top(name):
            used = {top(other) for other in found.on_load | found.later if is_ours(other)}
            imports.setdefault(top(name), set()).update(used - {top(name)})
    assert "table" in imports["gather"], "imports are found"
    # The command line is a user of the package and imports its public face.
    assert [name for name, used in imports.items() if "" in used] == ["cli"]
    imports["cli"].discard("")
    assert wrong_arrows(imports, PYTHON_ORDER) == []


def is_ours(name: str) -> bool:
    return name == "engram" or name.startswith("engram.")


def test_nobody_imports_the_command_line():
    users = {
        top(name)
        for name, found in python_imports().items()
        for other in found.on_load | found.later
        if is_ours(other) and top(other) == "cli"
    }
    assert users <= {"cli", "__main__"}


def test_importing_engram_imports_nothing_heavy():
    modules = python_imports()
    reached, waiting = set(), ["engram"]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        heavy = {other.split(".")[0] for other in modules[name].on_load} & NOT_WITH_ENGRAM
        assert not heavy, f"{name} imports {heavy}"
        waiting += [other for other in modules[name].on_load if other in modules]
        waiting += [
            f"engram.{top(other)}"
            for other in modules[name].on_load
            if is_ours(other) and f"engram.{top(other)}" in modules
        ]
    assert {"engram.gather", "engram.table", "engram.buffer"} <= reached
    assert not {name for name in reached if name.startswith("engram.cli")}


def test_names_that_are_loaded_late_exist():
    for name, module in engram._LAZY.items():
        assert name in engram.__all__
        assert importlib.util.find_spec(module) is not None, module


def sources(*suffixes: str) -> list[Path]:
    folders = ["rust", "python", "tests", "benches"]
    return [
        path
        for folder in folders
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in suffixes and "__pycache__" not in path.parts
    ]


@needs_sources
def test_no_file_is_long():
    long = {
        str(path.relative_to(ROOT)): count
        for path in sources(".rs", ".py", ".pyi")
        if (count := len(path.read_text().splitlines())) > LONGEST_FILE
    }
    assert long == {}


@needs_sources
def test_unsafe_code_is_where_it_may_be_and_says_why():
    assert re.search(r'(?m)^unsafe_code = "deny"$', (ROOT / "Cargo.toml").read_text())
    found = set()
    for crate, root in (("core", CORE), ("python", BINDING)):
        for path in sorted(root.rglob("*.rs")):
            if is_test(path, root):
                continue
            text = path.read_text()
            code = re.sub(r'"[^"\n]*"', '""', re.sub(r"//.*", "", text))
            header = re.search(r'#!\[expect\(\s*unsafe_code,\s*reason = "[^"]+"', text)
            allowed = re.search(r"allow\([^)]*unsafe_code|#\[expect\([^)]*unsafe_code", code)
            assert allowed is None, f"{path}: unsafe code is allowed for whole files only"
            if re.search(r"\bunsafe\b", code):
                found.add(f"{crate}/{path.relative_to(root)}")
                assert header is not None, f"{path} does not say why it holds unsafe code"
            else:
                assert header is None, f"{path} holds no unsafe code"
    assert found == UNSAFE


@needs_sources
def test_one_module_knows_the_system_it_is_built_for():
    wheres = {
        str(path.relative_to(root)): found
        for root in (CORE, BINDING)
        for path in sorted(root.rglob("*.rs"))
        if (found := re.findall(r'target_os|target_family|cfg\(unix|"portable"', rust_code(path)))
    }
    assert set(wheres) == {"system.rs"}


@needs_sources
def test_what_is_for_benchmarks_is_behind_a_feature():
    for library in (CORE / "lib.rs", BINDING / "lib.rs"):
        text = library.read_text()
        assert re.search(r'#\[cfg\([^\]]*feature = "bench"[^\]]*\)\]\s*(pub )?mod bench;', text)
    for manifest in (CORE.parent / "Cargo.toml", BINDING.parent / "Cargo.toml"):
        assert "default = " not in manifest.read_text()


DRAWS = "storage/progress_bar.py"
"""Draws on the error stream while a table is loaded into memory, if that is a terminal."""


def printing(code: str) -> list[int]:
    """Lines that print, or that name a stream of the process."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(code))
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"print", "pprint"}
        )
        or (
            isinstance(node, ast.Attribute)
            and node.attr in {"stdout", "stderr", "__stdout__", "__stderr__"}
        )
        or (isinstance(node, ast.ImportFrom) and node.module in {"rich", "rich.console"})
    ]


def test_the_library_prints_nothing_but_one_progress_bar():
    found = {
        str(path.relative_to(PYTHON))
        for path in PYTHON.rglob("*.py")
        if "cli" not in path.relative_to(PYTHON).parts and printing(path.read_text())
    }
    assert found == {DRAWS}


@pytest.mark.parametrize(
    "code", ["print(1)", "sys.stderr.write(x)", "log(file=sys.stdout)", "from rich import print"]
)
def test_printing_is_seen(code):
    assert printing(code) == [1]


@needs_sources
def test_the_native_code_prints_nothing():
    for root in (CORE, BINDING):
        for path in sorted(root.rglob("*.rs")):
            if not is_test(path, root):
                assert not re.search(r"\b(e?print(ln)?|dbg)!", rust_code(path)), path
