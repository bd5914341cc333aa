"""Follows README and documentation with the wheel of a folder, in an environment made for it.

    python .ci/walk.py dist [--without-torch]

First the wheel and its command line are installed as the README says, and the page that a stranger
starts with is followed. Then, unless told otherwise, what other pages install and need is added,
and every page is followed, blocks that need a minute included.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
FIRST = ROOT / "docs" / "index.md"
EXTRAS = ("cli", "metrics", "plot", "tokenizers", "torch")
"""Extras that the pages name and need."""
MORE = ("safetensors>=0.8", "transformers>=5.23")
"""What the pages import besides."""

sys.path.insert(0, str(ROOT / "tests"))

from documents import INSTALL, blocks  # noqa: E402 - a neighbour's, which no package holds


def installation(page: Path) -> str:
    """The commands by which a page installs engram, as they are written."""
    return "".join(block.text for block in blocks(page) if block.title == INSTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--without-torch", action="store_true", help="only the first page")
    arguments = parser.parse_args()
    found = list(arguments.folder.resolve().glob("*.whl"))
    if len(found) != 1:
        sys.exit(f"expected one wheel in {arguments.folder}, found {len(found)}")
    wheel = str(found[0])
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        tools = Path(folder, "bin")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment["PATH"] = f"{tools}{os.pathsep}{os.environ['PATH']}"
        environment["PIP_QUIET"] = "1"
        checkout = Path(folder, "checkout")
        checkout.mkdir()
        (checkout / "dist").symlink_to(arguments.folder.resolve())

        def run(*command: object) -> None:
            subprocess.run([tools / "python", *map(str, command)], env=environment, check=True)

        def install(page: Path) -> None:
            shell = ["bash", "-euo", "pipefail", "-c", installation(page)]
            subprocess.run(shell, env=environment, cwd=checkout, check=True)

        install(README)
        run(ROOT / "tests" / "documents.py", FIRST)
        if arguments.without_torch:
            return
        pages = [README, *sorted((ROOT / "docs").rglob("*.md"))]
        for page in pages[1:]:
            install(page)
        run("-m", "pip", "install", f"{wheel}[{','.join(EXTRAS)}]", *MORE)
        run(ROOT / "tests" / "documents.py", "--patient", *pages)


if __name__ == "__main__":
    main()
