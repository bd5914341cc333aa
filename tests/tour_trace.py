"""Runs a script and writes down which functions it has called.

    python tests/tour_trace.py calls.json script.py

Functions of Python are written as `file:qualified name`, those of the native module as
`Class.method`.
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
from pathlib import Path


def main() -> None:
    into, script = Path(sys.argv[1]), sys.argv[2]
    called: set[str] = set()

    def note(frame, event, argument) -> None:
        if event == "call":
            code = frame.f_code
            if "engram" in code.co_filename:
                called.add(f"{code.co_filename}:{code.co_qualname}")
        elif event == "c_call" and type(getattr(argument, "__self__", None)).__module__.startswith(
            "engram"
        ):
            called.add(argument.__qualname__)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        into.write_text(json.dumps(sorted(called)))


if __name__ == "__main__":
    main()
