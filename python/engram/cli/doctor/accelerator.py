"""torch, CUDA, and whether host memory can be registered: asked in a process of its own.

Neither is needed, and either may hang or end the process that asks.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from .finding import Finding

TIME_LIMIT = 120.0

_ASK = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
def say(**fields):
    print(json.dumps(fields), flush=True)
    sys.exit()
try:
    import torch
except ModuleNotFoundError as error:
    say(torch=None, missing=error.name)
known = {"torch": torch.__version__, "cuda": torch.version.cuda}
if not torch.cuda.is_available():
    say(**known, devices=[])
known["devices"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
import engram
try:
    buffer = engram.HostBuffer(16 << 20).pin()
    buffer.unpin()
    say(**known, pinned=True)
except Exception as error:
    say(**known, pinned=False, reason=str(error))
"""


def ask(time_limit: float = TIME_LIMIT) -> dict[str, Any]:
    """What torch says: `torch` (a version or None), `cuda`, `devices`, `pinned`, `reason`.

    Where the question has no answer, `failure` says why.
    """
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _ASK, json.dumps(sys.path)],
            capture_output=True,
            text=True,
            timeout=time_limit,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"failure": f"no answer within {time_limit:g} s"}
    except OSError as error:
        return {"failure": str(error)}
    lines = asked.stdout.splitlines()
    if asked.returncode != 0 or not lines:
        said = asked.stderr.strip().splitlines()
        ended = f"it ended with status {asked.returncode}"
        return {"failure": f"{ended}: {said[-1]}" if said else ended}
    try:
        answer: dict[str, Any] = json.loads(lines[-1])
    except ValueError:
        return {"failure": f"it said {lines[-1]!r}"}
    return answer


def torch(answer: dict[str, Any]) -> Finding:
    """Whether tensors, devices and pinned memory can be used."""
    if "failure" in answer:
        return Finding(
            "torch",
            "warning",
            f"cannot be asked: {answer['failure']}",
            "engram works without torch; what needs it will fail as it did here",
            answer,
        )
    if answer["torch"] is None:
        found = "not installed; rows come as numpy arrays"
        if answer.get("missing") == "torch":
            return Finding("torch", "ok", found, None, answer)
        return Finding(
            "torch", "warning", "does not import", f"install {answer.get('missing')}", answer
        )
    devices: list[str] = answer["devices"]
    if not devices:
        built = f"built for CUDA {answer['cuda']}" if answer["cuda"] else "built without CUDA"
        found = f"{answer['torch']}, {built}, no device"
        return Finding("torch", "ok", found, None, answer)
    found = f"{answer['torch']}, CUDA {answer['cuda']}, {', '.join(devices)}"
    if answer["pinned"]:
        return Finding("torch", "ok", f"{found}; host memory can be registered", None, answer)
    return Finding(
        "torch",
        "warning",
        f"{found}; host memory cannot be registered: {answer['reason']}",
        "copies to the device wait for each other; cpu_offload=True fails: use disk_offload=True",
        answer,
    )
