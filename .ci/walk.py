"""Follows README and documentation with the wheel of a folder, in an environment made for it.

    python .ci/walk.py dist [--without-torch]

First the page that a stranger starts with, where nothing but the wheel and its command line is
installed; then, unless told otherwise, torch and transformers are added and every page is followed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = ROOT / "docs" / "index.md"
MORE = ("safetensors>=0.8", "transformers>=5.23")


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

        def run(*command: object) -> None:
            subprocess.run([tools / "python", *map(str, command)], env=environment, check=True)

        run("-m", "pip", "install", "--quiet", f"{wheel}[cli]")
        run(ROOT / "tests" / "documents.py", FIRST)
        if arguments.without_torch:
            return
        run("-m", "pip", "install", "--quiet", f"{wheel}[cli,torch,tokenizers]", *MORE)
        pages = sorted((ROOT / "docs").rglob("*.md"))
        run(ROOT / "tests" / "documents.py", ROOT / "README.md", *pages)


if __name__ == "__main__":
    main()
