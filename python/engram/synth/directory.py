"""The directory of a synthetic checkpoint: claiming it, its JSON documents, finding it again."""

from __future__ import annotations

import errno
import json
import random
import shutil
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .layout import Layout, index_json
from .plan import Plan, plan

if TYPE_CHECKING:
    import os
    from collections.abc import Generator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from .plan import SynthTable

MANIFEST = "engram_synth.json"
"""File that records how a directory was made, so that its rows can be checked later."""

MANIFEST_VERSION = 1
_INDEX = "model.safetensors.index.json"
_CONFIG = "config.json"


@dataclass(frozen=True)
class SynthInfo:
    """A synthetic checkpoint on disk.

    Attributes:
        directory: The checkpoint's directory.
        plan: What was written.
        marked: For a sparse checkpoint, the ids of the rows that hold bytes, by table name; None
            where every row does.
    """

    directory: Path
    plan: Plan
    marked: Mapping[str, NDArray[np.int64]] | None = None

    @property
    def family(self) -> str:
        """Model family."""
        return self.plan.family

    @property
    def config(self) -> Mapping[str, Any]:
        """The document of `config.json`."""
        return self.plan.config

    @property
    def tables(self) -> tuple[SynthTable, ...]:
        """Tables in layer order."""
        return self.plan.tables

    @property
    def files(self) -> tuple[Path, ...]:
        """Safetensors files in name order."""
        return tuple(self.directory / file.name for file in self.plan.files)

    @property
    def nbytes(self) -> int:
        """Bytes of all safetensors files."""
        return self.plan.nbytes

    def remove(self) -> None:
        """Deletes the files that were written; the directory stays."""
        _remove(self.directory, [file.name for file in self.plan.files])


@contextmanager
def filling(
    directory: Path, planned: Plan, *, overwrite: bool, sparse: bool = False
) -> Generator[None]:
    """Claims `directory` while the caller writes the safetensors files of `planned` into it.

    When the body succeeds the configuration, index and manifest follow. When it fails, everything
    this wrote is removed again.

    Raises:
        FileExistsError: The directory holds something. With `overwrite` an earlier synthetic
            checkpoint is replaced; other files are never removed.
        OSError: Not enough space, or what the kernel refused.
    """
    existed = directory.exists()
    directory.mkdir(parents=True, exist_ok=True)
    if overwrite:
        _remove_earlier(directory)
    if any(directory.iterdir()):
        raise FileExistsError(
            errno.EEXIST,
            "directory is not empty; choose another, or overwrite an earlier synthetic checkpoint",
            str(directory),
        )
    if not sparse:
        free = shutil.disk_usage(directory).free
        if free < planned.nbytes:
            if not existed:
                directory.rmdir()
            raise OSError(
                errno.ENOSPC,
                f"the checkpoint needs {planned.nbytes} bytes and {free} are free",
                str(directory),
            )
    # The manifest comes first, marked incomplete: a run that is killed leaves a directory which
    # `overwrite` recognises and `load` refuses.
    _write_manifest(directory, planned, complete=False, sparse=sparse)
    try:
        yield
        _write_json(directory / _CONFIG, planned.config)
        if len(planned.files) > 1:
            generator = random.Random(f"index {planned.seed}")
            (directory / _INDEX).write_bytes(index_json(planned.files, generator))
        _write_manifest(directory, planned, complete=True, sparse=sparse)
    except BaseException:
        _remove(directory, [file.name for file in planned.files])
        if not existed:
            directory.rmdir()
        raise


def read_manifest(directory: str | os.PathLike[str]) -> tuple[Plan, bool]:
    """The plan of a synthetic checkpoint, and whether it is sparse.

    Raises:
        FileNotFoundError: The directory holds no manifest.
        ValueError: The manifest is of another version, or writing never finished.
    """
    manifest = _manifest(Path(directory))
    if not manifest["complete"]:
        raise ValueError(f"synthetic checkpoint {directory} was never finished; write it again")
    arguments = dict(manifest["arguments"])
    arguments["layout"] = Layout(**arguments["layout"])
    return plan(arguments.pop("family"), **arguments), bool(manifest["sparse"])


def _manifest(directory: Path) -> Mapping[str, Any]:
    path = directory / MANIFEST
    try:
        manifest: Mapping[str, Any] = json.loads(path.read_text())
        version = manifest["version"]
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{path} is not the manifest of a synthetic checkpoint") from None
    if version != MANIFEST_VERSION:
        raise ValueError(f"{path} has version {version}, this engram reads {MANIFEST_VERSION}")
    return manifest


def _write_manifest(directory: Path, planned: Plan, *, complete: bool, sparse: bool) -> None:
    document = {
        "version": MANIFEST_VERSION,
        "complete": complete,
        "sparse": sparse,
        "arguments": planned.arguments,
        "files": [file.name for file in planned.files],
    }
    _write_json(directory / MANIFEST, document)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=2) + "\n")


def _remove_earlier(directory: Path) -> None:
    try:
        names = _manifest(directory)["files"]
    except FileNotFoundError:
        return
    # Names come from a file: only plain names inside this directory are acted on.
    _remove(directory, [str(name) for name in names if Path(str(name)).name == str(name)])


def _remove(directory: Path, names: list[str]) -> None:
    for name in (*names, _CONFIG, _INDEX, MANIFEST):
        (directory / name).unlink(missing_ok=True)
