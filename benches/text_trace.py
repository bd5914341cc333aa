"""Token ids of real text, and the row ids a model would look up for it.

The text is Python source that every installation has: all `*.py` files below 400,000 bytes of the
standard library and of the installed torch, transformers and numpy. Files are sorted by package and
path inside the package, shuffled with seed 0, and tokenised with tekken, the 131,072-token
vocabulary that the package mistral-common carries. Each file is a document of its own. Tokens hash
by Qwen's rule with the released constants; `RowIds` then folds each head's range of ids onto the
smaller one of a benchmark's table.

    python benches/text_trace.py [--dir DIRECTORY] [--limit TOKENS]

builds and caches the trace and prints its sha256: of the tokens as little-endian int32, followed by
the documents' starts as little-endian int64. The sum depends on the installed versions, which are
printed with it.
"""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engram.hashing import QwenHash

PACKAGES = ("torch", "transformers", "numpy")
MOST_BYTES = 400_000
VOCABULARY = "tekken_240911.json"
RELEASED = {
    "vocab_size": 248_320,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20_000_000,
    "seed": 1234,
    "eos_token_id": 248_044,
}
_CHUNK = 256
_OUTSIDE = {"site-packages", "dist-packages"}


class Unavailable(Exception):
    """The trace cannot be built here; says what to install."""


@dataclass(frozen=True)
class TextTrace:
    """Tokenised documents, one after another.

    Attributes:
        tokens: int32 `[T]`.
        starts: int64 `[documents + 1]`, from 0 to T: document d is `tokens[starts[d]:starts[d+1]]`.
        sha256: Of both.
        versions: What the text and its tokens depend on.
    """

    tokens: np.ndarray
    starts: np.ndarray
    sha256: str
    versions: dict[str, str]

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{len(self.tokens):,} tokens in {len(self.starts) - 1:,} documents, "
            f"sha256 {self.sha256} ({versions})"
        )


class RowIds:
    """Row ids of a trace, folded onto a table.

    Args:
        trace: The tokens.
        config: `config.json` of the checkpoint with the table: Qwen, with as many heads per order.
    """

    def __init__(self, trace: TextTrace, config: dict) -> None:
        self._trace = trace
        self._hash = QwenHash(RELEASED)
        table = QwenHash(config)
        if table.heads != self._hash.heads:
            raise ValueError(f"the table has {table.heads} heads, the rule {self._hash.heads}")
        self.heads = self._hash.heads
        self._released = np.array(self._hash.head_offsets, np.int64)
        self._sizes = np.array(table.head_sizes, np.int64)
        self._offsets = np.array(table.head_offsets, np.int64)

    def released(self, first: int, last: int) -> np.ndarray:
        """Ids of the tokens `first..last` in the released table, int64 `[last - first, heads]`."""
        trace = self._trace
        inside = trace.starts[(trace.starts > first) & (trace.starts < last)]
        starts = np.concatenate([[0], inside - first, [last - first]])
        context = np.full((len(starts) - 1, self._hash.context_len), self._hash.filler, np.int64)
        document = int(np.searchsorted(trace.starts, first, side="right")) - 1
        known = min(self._hash.context_len, first - int(trace.starts[document]))
        if known:
            context[0, -known:] = trace.tokens[first - known : first]
        return self._hash.ids(trace.tokens[first:last], starts, context)

    def folded(self, first: int, last: int) -> np.ndarray:
        """The same, each head's ids modulo the rows of that head in the benchmark's table."""
        local = self.released(first, last) - self._released
        return local % self._sizes + self._offsets

    def batches(self, rows: int, generator: np.random.Generator) -> Iterator[np.ndarray]:
        """Flat ids of `rows` rows: consecutive tokens from random places, without end."""
        tokens = -(-rows // self.heads)
        while True:
            first = int(generator.integers(0, len(self._trace.tokens) - tokens + 1))
            yield self.folded(first, first + tokens).reshape(-1)[:rows]


def load(
    directory: Path, *, limit: int | None = None, say: Callable[[str], object] = lambda _: None
) -> TextTrace:
    """The trace, built on first use and cached below `directory`.

    Args:
        directory: Where checkpoints and traces of the benchmarks are kept.
        limit: Stop after the document with which there are this many tokens.
        say: Told what takes long.

    Raises:
        Unavailable: A package is not installed.
    """
    versions = _versions()
    key = json.dumps([versions, limit, PACKAGES, MOST_BYTES, VOCABULARY])
    home = directory / f"text-trace-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    try:
        described = json.loads((home / "trace.json").read_text())
        tokens = np.load(home / "tokens.npy")
        starts = np.load(home / "starts.npy")
    except (OSError, ValueError):
        described = {}
    if described and _checksum(tokens, starts) == described["sha256"]:
        return TextTrace(tokens, starts, described["sha256"], versions)
    say("tokenising Python source, once")
    started = time.perf_counter()
    tokens, starts = _tokenised(limit)
    trace = TextTrace(tokens, starts, _checksum(tokens, starts), versions)
    _store(home, trace)
    say(f"tokenised in {time.perf_counter() - started:.0f} s")
    return trace


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in (*PACKAGES, "mistral-common"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            message = f'real text needs {name}; pip install "engram-gather[bench]"'
            raise Unavailable(message) from None
    return versions


def sources() -> list[Path]:
    """The files, in the order of the trace."""
    roots = {"": Path(sysconfig.get_path("stdlib"))}
    for name in PACKAGES:
        found = importlib.util.find_spec(name)
        assert found is not None
        assert found.origin is not None
        roots[name] = Path(found.origin).parent
    listed = [
        (name, path.relative_to(root).as_posix(), path)
        for name, root in roots.items()
        for path in root.rglob("*.py")
        if (name or not _OUTSIDE.intersection(path.relative_to(root).parts))
        and path.is_file()
        and path.stat().st_size < MOST_BYTES
    ]
    listed.sort()
    random.Random(0).shuffle(listed)
    return [path for *_, path in listed]


def _tokenised(limit: int | None) -> tuple[np.ndarray, np.ndarray]:
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    tokenizer = Tekkenizer.from_file(Path(mistral_common.__file__).parent / "data" / VOCABULARY)

    def encoded(path: Path) -> np.ndarray:
        text = path.read_text(encoding="utf-8", errors="replace")
        return np.array(tokenizer.encode(text, bos=False, eos=False), "<i4")

    documents: list[np.ndarray] = []
    total = 0
    paths = sources()
    # The tokeniser releases the interpreter's lock.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        chunk = _CHUNK if limit is None else 8
        for at in range(0, len(paths), chunk):
            for document in pool.map(encoded, paths[at : at + chunk]):
                if len(document) and (limit is None or total < limit):
                    documents.append(document)
                    total += len(document)
            if limit is not None and total >= limit:
                break
    lengths = [len(document) for document in documents]
    return np.concatenate(documents), np.concatenate([[0], np.cumsum(lengths)]).astype("<i8")


def _checksum(tokens: np.ndarray, starts: np.ndarray) -> str:
    checksum = hashlib.sha256(np.ascontiguousarray(tokens, "<i4"))
    checksum.update(np.ascontiguousarray(starts, "<i8"))
    return checksum.hexdigest()


def _store(home: Path, trace: TextTrace) -> None:
    home.parent.mkdir(parents=True, exist_ok=True)
    # Under another name until it is complete, so that a run that is killed leaves no half trace.
    partial = Path(tempfile.mkdtemp(prefix=home.name, dir=home.parent))
    np.save(partial / "tokens.npy", trace.tokens)
    np.save(partial / "starts.npy", trace.starts)
    described = {"sha256": trace.sha256, "versions": trace.versions}
    (partial / "trace.json").write_text(json.dumps(described, indent=2) + "\n")
    shutil.rmtree(home, ignore_errors=True)
    partial.rename(home)


def main(arguments: list[str] | None = None) -> int:
    from support.options import parser

    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--dir", type=Path, default=parser("", seconds=0).get_default("dir"))
    made.add_argument("--limit", type=int, help="stop after about this many tokens")
    options = made.parse_args(arguments)
    try:
        print(load(Path(options.dir), limit=options.limit, say=print))
    except Unavailable as error:
        sys.exit(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
