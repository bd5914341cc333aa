"""Runs the code blocks of documents, as a reader would who follows them from top to bottom.

    python tests/documents.py [--patient] README.md docs/index.md

runs the blocks of each document in an empty folder, with whatever `engram` the interpreter imports
and whatever `engram` command stands first in PATH. A block with a title is run only where the title
does not say that it needs more than that (with `--patient` it may need time):

    ```sh title="needs a package index"
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_FENCE = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^```$', re.DOTALL | re.M
)
RUN = ("python", "sh")
"""Languages whose blocks are run; all others are read only."""

INSTALL = "needs the wheel and a package index"
"""Blocks that install engram from a folder `dist`, for whoever made an environment for them."""

TIME = {"needs a minute", "needs a minute and the extra plot"}
"""What blocks need that can be run, but not by a test suite."""


@dataclass(frozen=True)
class Block:
    """A fenced piece of a document."""

    document: str
    line: int
    language: str
    title: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.document}, line {self.line}"

    @property
    def missing(self) -> str:
        """What the block needs that is not here; empty where it can be run."""
        if not self.title.startswith("needs "):
            return ""
        return "" if self.title == "needs a CUDA device" and _cuda() else self.title


def _cuda() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_available()


def documents() -> list[Path]:
    """README and every page of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(path: Path) -> str:
    return str(path.resolve().relative_to(ROOT))


def blocks(path: Path) -> list[Block]:
    """The blocks of a document that are meant to be run, those that need more included."""
    text = path.read_text(encoding="utf-8")
    return [
        Block(
            name_of(path),
            text[: found.start()].count("\n") + 1,
            found["language"],
            found["title"] or "",
            found["text"],
        )
        for found in _FENCE.finditer(text)
        if found["language"] in RUN
    ]


def prepare(folder: Path) -> None:
    """What documents take for granted: two checkpoints, in small, and the examples."""
    from engram import synth

    synth.write(folder / "Qwen3.8-Flash-Next-FP8", "qwen", rows=5000, dtype="fp8")
    synth.write(folder / "DeepSeek-V4.1-Flash", "deepseek", rows=3000)
    (folder / "examples").symlink_to(ROOT / "examples")


def run(path: Path, environment: dict[str, str], *, patient: bool = False) -> list[Block]:
    """Runs the blocks of one document in the working folder; returns those left out.

    Python blocks share their names, as in a session; shell blocks stop at the first failure.

    Args:
        path: The document.
        environment: Variables for shell blocks.
        patient: Whether blocks that need no more than a minute run too.

    Raises:
        Exception: What a Python block raised.
        RuntimeError: A shell block failed; holds what it wrote.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    left_out = []
    for block in blocks(path):
        if block.missing and not (patient and block.title in TIME):
            left_out.append(block)
        elif block.language == "python":
            # Padded, so that a traceback names the line of the document.
            padded = "\n" * block.line + block.text
            exec(compile(padded, block.document, "exec"), names)
        else:
            done = subprocess.run(
                ["bash", "-euo", "pipefail", "-c", block.text],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode:
                raise RuntimeError(
                    f"{block.name}: status {done.returncode}\n{block.text}\n{done.stdout}"
                    f"\n{done.stderr}"
                )
    for value in names.values():
        # A document may leave open what a session would.
        if type(value).__module__.startswith("engram") and hasattr(value, "close"):
            value.close()
    return left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("documents", type=Path, nargs="+")
    parser.add_argument("--patient", action="store_true", help="run what needs a minute, too")
    arguments = parser.parse_args()
    for document in arguments.documents:
        path = document.resolve()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            prepare(Path(folder))
            left_out = run(path, dict(os.environ), patient=arguments.patient)
            os.chdir(ROOT)
        count = len(blocks(path)) - len(left_out)
        print(f"{name_of(path)}: {count} blocks run", flush=True)
        for block in left_out:
            print(f"  left out, line {block.line}: {block.title}", flush=True)


if __name__ == "__main__":
    main()
