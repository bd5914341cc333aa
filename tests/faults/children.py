"""Scripts run in processes of their own: for limits, signals, and everything that may kill."""

from __future__ import annotations

import ctypes
import ctypes.util
import json
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from engram import synth

HERE = Path(__file__).parent

PRELUDE = """
import json, os, sys, threading, time
import numpy as np
import engram
from engram import synth
from children import *

def report(**values):
    print(json.dumps(values), flush=True)
"""


def child(
    script: str,
    *arguments: object,
    before: str = "",
    code: int = 0,
    env: dict[str, str] | None = None,
    timeout: float = 90,
    python: tuple[str, ...] = (),
) -> Any:
    """Runs a script, its arguments in `sys.argv`; returns what it reported last.

    Args:
        script: Python after `PRELUDE` and `before`.
        arguments: Passed as text.
        before: What several scripts begin with.
        code: The exit code to expect; negative for a signal.
        env: More environment.
        timeout: Seconds after which it has failed.
        python: Options of the interpreter.
    """
    path = os.pathsep.join([str(HERE), str(HERE.parent), *filter(None, sys.path)])
    finished = subprocess.run(
        [
            sys.executable,
            *python,
            "-c",
            PRELUDE + before + textwrap.dedent(script),
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path, **(env or {})},
        check=False,
    )
    said = f"{finished.stdout[-2000:]}\n{finished.stderr[-4000:]}"
    assert finished.returncode == code, f"exit code {finished.returncode}\n{said}"
    lines = finished.stdout.splitlines()
    answer = json.loads(lines[-1]) if lines else {}
    answer["stderr"] = finished.stderr
    return answer


def right(info: synth.SynthInfo, ids: Any, rows: Any, table: int = 0) -> bool:
    """Whether rows of a table of one plane are those stored."""
    expected = synth.expected_rows(info, ids, table)["weight"]
    return bool((np.asarray(rows).view(np.uint8).reshape(expected.shape) == expected).all())


def io_bytes() -> int:
    """Bytes this process has made devices read so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    raise AssertionError("no read_bytes in /proc/self/io")


def mappings(path: str) -> list[dict[str, str]]:
    """Fields of `/proc/self/smaps` of every mapping of a file; `address` is the first line."""
    found: list[dict[str, str]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            found.append({"address": line})
        else:
            key, value = line.split(":", 1)
            found[-1][key] = value.strip()
    return [each for each in found if each["address"].endswith(path)]


LIBC = ctypes.CDLL(None, use_errno=True)


def check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


# What is needed of seccomp and mounts, which Python does not have.

CLONE_NEWNS = 0x00020000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
SYSCALLS = {
    "x86_64": {"mmap": 9, "openat": 257, "io_uring_setup": 425, "clone": 56, "clone3": 435},
    "aarch64": {"mmap": 222, "openat": 56, "io_uring_setup": 425, "clone": 220, "clone3": 435},
}.get(os.uname().machine, {})


SYS_SECCOMP = {"x86_64": 317, "aarch64": 277}.get(os.uname().machine, -1)


def refuse(
    name: str, error: int, argument: int | None = None, mask: int = 0, value: int = 0
) -> None:
    """Makes the kernel answer a system call of any thread with `error`, by a seccomp filter.

    With `argument` only calls whose argument of that index, masked, equals `value`.
    """
    load, equal, masked, answer = 0x20, 0x15, 0x54, 0x06
    allow, refusal = 0x7FFF0000, 0x00050000 | error
    program = [(load, 0, 0, 0)]
    if argument is None:
        program += [(equal, 0, 1, SYSCALLS[name])]
    else:
        program += [
            (equal, 0, 4, SYSCALLS[name]),
            (load, 0, 0, 16 + 8 * argument),
            (masked, 0, 0, mask),
            (equal, 0, 1, value),
        ]
    program += [(answer, 0, 0, refusal), (answer, 0, 0, allow)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *each) for each in program))
    filters = struct.pack("<HxxxxxxQ", len(program), ctypes.addressof(code))
    no_new_privileges, filter_mode, all_threads = 38, 1, 1
    check(LIBC.prctl(no_new_privileges, 1, 0, 0, 0))
    check(LIBC.syscall(SYS_SECCOMP, filter_mode, all_threads, ctypes.create_string_buffer(filters)))


def own_mounts() -> None:
    """Gives this process mounts of its own."""
    check(LIBC.unshare(CLONE_NEWNS))
    check(LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))


def mount(source: Path, target: Path, kind: str = "", flags: int = 0, data: str = "") -> None:
    arguments = [os.fsencode(source), os.fsencode(target), kind.encode() or None]
    check(LIBC.mount(*arguments, flags, data.encode() or None))
