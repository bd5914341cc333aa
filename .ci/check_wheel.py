"""Installs the wheel in a folder into an empty environment, imports it and gathers with it.

python .ci/check_wheel.py dist
"""

import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

MOST_BYTES = 5_000_000
NEEDED = ("engram/py.typed", "engram/_engram.pyi", "engram/_engram.abi3.so")

GATHER = """
import importlib.util
import sys

for absent in ("torch", "typer", "transformers"):
    assert importlib.util.find_spec(absent) is None, f"the environment has {absent}"

import numpy as np

import engram
from engram import _engram, synth

assert not hasattr(_engram, "bench_copy"), "built with the loops of the benchmarks"
assert "pydantic" not in sys.modules, "importing engram imports pydantic"
info = synth.write("checkpoint", "deepseek", rows=5000)
for table in info.tables:
    with engram.FileGather("checkpoint", table.name) as gather:
        ids = np.array([[0, 7, -1], [gather.num_rows - 1, 7, 1]])
        rows = gather.gather(ids, pad_id=-1)
        wanted = table.expected(np.maximum(ids, 0))
        for plane in gather.planes:
            got = rows[plane.name].view(np.uint8)
            want = np.where(ids[..., None] < 0, 0, wanted[plane.name])
            assert (got == want).all(), plane.name
print(f"engram {engram.__version__} imports and gathers without torch")
"""


def main() -> None:
    found = list(Path(sys.argv[1]).glob("*.whl"))
    if len(found) != 1:
        sys.exit(f"expected one wheel in {sys.argv[1]}, found {[path.name for path in found]}")
    wheel = found[0].resolve()
    if not re.fullmatch(r"engram_gather-[^-]+-cp311-abi3-[^-]+\.whl", wheel.name):
        sys.exit(f"{wheel.name} is no wheel for every Python from 3.11 on")
    if wheel.stat().st_size > MOST_BYTES:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MOST_BYTES}")
    names = zipfile.ZipFile(wheel).namelist()
    missing = [name for name in NEEDED if name not in names]
    if missing or not any(name.endswith("/LICENSE") for name in names):
        sys.exit(f"{wheel.name} lacks {missing or 'LICENSE'}")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder, "venv"), with_pip=True)
        python = Path(folder, "venv", "bin", "python")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        for command in (
            [python, "-m", "pip", "install", "--quiet", wheel],
            [python, "-W", "error", "-c", GATHER],
        ):
            subprocess.run(command, cwd=folder, env=environment, check=True)
        command = [python, "-m", "engram", "--version"]
        answer = subprocess.run(
            command, cwd=folder, env=environment, check=False, capture_output=True, text=True
        )
        if answer.returncode != 1 or "install engram-gather[cli]" not in answer.stderr:
            sys.exit(f"without its extra the command said {answer.stderr or answer.stdout!r}")
    print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
