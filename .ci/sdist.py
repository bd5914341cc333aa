"""Builds the source archive into a folder, and a wheel from it where nothing can be downloaded.

    python .ci/sdist.py dist

The crates come from cargo's own cache, which `cargo fetch` fills first; the build tools from the
environment of this interpreter.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_BYTES = 2_000_000


def main() -> None:
    folder = Path(sys.argv[1]).resolve()
    for old in folder.glob("engram_gather-*.tar.gz"):
        old.unlink()
    command = [sys.executable, "-m", "maturin", "sdist", "--out", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True)
    archive = next(folder.glob("engram_gather-*.tar.gz"))
    if archive.stat().st_size > MOST_BYTES:
        sys.exit(f"{archive.name} has {archive.stat().st_size} bytes: what is in it?")
    subprocess.run(["cargo", "fetch", "--locked"], cwd=ROOT, check=True)
    alone = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode:
        print("no namespace without a network can be had here; cargo and pip are told to use none")
        alone = []
    environment = {
        **os.environ,
        "CARGO_NET_OFFLINE": "true",
        # To see that it builds; a release is built from a checkout.
        "CARGO_PROFILE_RELEASE_LTO": "off",
        "CARGO_PROFILE_RELEASE_CODEGEN_UNITS": "16",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-build-isolation"]
        command += ["--no-deps", "--wheel-dir", scratch, str(archive)]
        subprocess.run([*alone, *command], env=environment, check=True)
        built = next(Path(scratch).glob("*.whl"))
        print(f"{archive.name}, {archive.stat().st_size / 1e6:.1f} MB, builds {built.name} offline")


if __name__ == "__main__":
    main()
