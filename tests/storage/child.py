"""Code that runs in a process of its own, under limits that would hurt the others."""

from __future__ import annotations

import ctypes
import json
import platform
import struct
import subprocess
import sys
import textwrap
from pathlib import Path

HERE = Path(__file__).parent

PRELUDE = """
import json, sys, warnings
sys.path.insert(0, {here!r})
import numpy as np
import engram
from checkpoints import check_rows, some_ids
arguments = json.loads(sys.argv[1])
caught = warnings.catch_warnings(record=True)
warned = caught.__enter__()
warnings.simplefilter("always")

def report(**values):
    values["warned"] = [str(warning.message) for warning in warned]
    print(json.dumps(values))
"""


def run(code, prefix=(), timeout=120, **arguments):
    """Runs `code`, which calls `report(...)`, and gives what it reported.

    Args:
        code: Python, after `PRELUDE`; `arguments` holds the keyword arguments.
        prefix: A command that starts the interpreter.
        timeout: Seconds.
        arguments: JSON values.
    """
    done = start(code, prefix, timeout, **arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def start(code, prefix=(), timeout=120, **arguments):
    """As `run`, whatever becomes of it."""
    program = PRELUDE.format(here=str(HERE)) + textwrap.dedent(code)
    command = [*prefix, sys.executable, "-c", program, json.dumps(arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout)


def own_shared_memory(size):
    """A command prefix that gives a process a /dev/shm of `size`; None where that is refused."""
    script = f'mount -t tmpfs -o size={size} none /dev/shm && exec "$@"'
    prefix = ["unshare", "-m", "sh", "-c", script, "sh"]
    allowed = subprocess.run([*prefix, "true"], capture_output=True).returncode == 0
    return prefix if allowed else None


def anonymous_bytes():
    """Anonymous memory of this process in use."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssAnon")


def refuse_calls(numbers, errno):
    """From now on these system calls of this process fail, as a container's profile has them.

    Returns:
        Whether the kernel agreed (x86-64 alone).
    """
    if platform.machine() != "x86_64":
        return False
    load, jump_if_equal, give = 0x20, 0x15, 0x06
    program = [struct.pack("HBBI", load, 0, 0, 0)]
    for number in numbers:
        program.append(struct.pack("HBBI", jump_if_equal, 0, 1, number))
        program.append(struct.pack("HBBI", give, 0, 0, 0x0005_0000 | errno))
    program.append(struct.pack("HBBI", give, 0, 0, 0x7FFF_0000))
    code = ctypes.create_string_buffer(b"".join(program))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    libc = ctypes.CDLL(None, use_errno=True)
    filters = Program(len(program), ctypes.addressof(code))
    no_new_privileges, set_seccomp, mode_filter = 38, 22, 2
    if libc.prctl(no_new_privileges, 1, 0, 0, 0) != 0:
        return False
    return libc.prctl(set_seccomp, mode_filter, ctypes.byref(filters), 0, 0) == 0
