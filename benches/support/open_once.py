"""A fresh process that opens a checkpoint; `opening.py` starts it with a task as JSON."""

import gc
import importlib
import importlib.util
import json
import sys
import time

import safetensors
import safetensors.numpy
from kernel import memory_of_process

import engram


def by_engram(task: dict) -> engram.FileGather:
    return engram.FileGather(task["checkpoint"])


def by_safetensors(files: list[str], framework: str) -> object:
    handles = []
    for file in files:
        handle = safetensors.safe_open(file, framework=framework)
        list(handle.keys())
        handles.append(handle)
    return handles


def main(task: dict) -> dict:
    gc.disable()
    if task.get("memory"):
        before = memory_of_process()
        opened = by_engram(task)
        after = memory_of_process()
        del opened
        return {name: after[name] - before[name] for name in after}
    ways = [
        ("engram", lambda: by_engram(task)),
        ("described", lambda: by_engram(task).info),
        ("all", lambda: by_safetensors(task["all"], "np")),
        ("held", lambda: by_safetensors(task["held"], "np")),
    ]
    if importlib.util.find_spec("torch"):
        importlib.import_module("torch")
        ways.append(("torch", lambda: by_safetensors(task["all"], "pt")))
    seconds: dict[str, list[float]] = {name: [] for name, _ in ways}
    for turn in range(task["turn"], task["turn"] + task["repeats"] + 1):
        for place in range(len(ways)):
            name, run = ways[(place + turn) % len(ways)]
            begin = time.perf_counter()
            opened = run()
            seconds[name].append(time.perf_counter() - begin)
            del opened
    return seconds


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
