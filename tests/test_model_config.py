"""Which platform a process is on, for every mixture of torch builds and device nodes."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engram import model_config
from engram.model_config import detect_platform

NODES = {"nvidia": "nvidiactl", "amd": "kfd"}


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Builds a machine: device nodes, a ROCm installation and a torch, each present or not."""

    def build(nodes=(), rocm=False, torch=None, imported=True):
        device_root, rocm_root = tmp_path / "dev", tmp_path / "opt" / "rocm"
        device_root.mkdir()
        for node in nodes:
            (device_root / NODES[node]).touch()
        if rocm:
            rocm_root.mkdir(parents=True)
        monkeypatch.setattr(model_config, "_DEVICE_ROOT", device_root)
        monkeypatch.setattr(model_config, "_ROCM_ROOT", rocm_root)
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        spec = None
        if torch is not None:
            versions = {
                "cuda": (torch == "cuda" and "13.2") or None,
                "hip": (torch == "rocm" and "7.1") or None,
            }
            if imported:
                module = SimpleNamespace(version=SimpleNamespace(**versions))
                monkeypatch.setitem(sys.modules, "torch", module)
            package = tmp_path / "torch"
            package.mkdir()
            (package / "version.py").write_text(
                "from typing import Optional\n"
                "__version__ = '2.15.0'\n"
                f"cuda: Optional[str] = {versions['cuda']!r}\n"
                f"hip: Optional[str] = {versions['hip']!r}\n"
                "raise RuntimeError('this file is read, not run')\n"
            )
            spec = SimpleNamespace(origin=str(package / "__init__.py"))
        monkeypatch.setattr(model_config.importlib.util, "find_spec", lambda name: spec)

    return build


@pytest.mark.case("C08")
@pytest.mark.parametrize("imported", [True, False], ids=["imported", "installed"])
@pytest.mark.parametrize(
    ("nodes", "torch", "platform"),
    [
        (("nvidia",), "cuda", "cuda"),
        (("nvidia",), "cpu", "cpu"),
        (("nvidia", "amd"), "cuda", "cuda"),
        (("nvidia", "amd"), "rocm", "rocm"),
        (("amd",), "rocm", "rocm"),
        (("amd",), "cuda", "cpu"),
        ((), "cuda", "cpu"),
        ((), "rocm", "cpu"),
        ((), "cpu", "cpu"),
    ],
)
def test_torch_build_and_device_nodes_decide_together(machine, nodes, torch, platform, imported):
    machine(nodes=nodes, torch=torch, imported=imported)
    assert detect_platform() == platform


@pytest.mark.parametrize(
    ("nodes", "rocm", "platform"),
    [
        ((), False, "cpu"),
        (("nvidia",), False, "cuda"),
        (("nvidia", "amd"), True, "cuda"),
        (("amd",), True, "rocm"),
        # A laptop with an AMD chip has the device node, and no ROCm.
        (("amd",), False, "cpu"),
    ],
)
def test_device_nodes_decide_without_torch(machine, nodes, rocm, platform):
    machine(nodes=nodes, rocm=rocm)
    assert detect_platform() == platform


def test_an_unreadable_torch_counts_as_built_for_no_device(machine, tmp_path):
    machine(nodes=("nvidia",), torch="cuda", imported=False)
    (tmp_path / "torch" / "version.py").write_text("cuda = (")
    assert detect_platform() == "cpu"
    (tmp_path / "torch" / "version.py").unlink()
    assert detect_platform() == "cpu"


def test_configuration_and_detection_do_not_import_torch():
    program = (
        "import sys; from engram.config import EngramConfig; "
        "EngramConfig().verify_model_config("
        "{'architectures': ['Qwen4ExpForCausalLM'], 'ple_layer_ids': [2]}); "
        "print('torch' in sys.modules)"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "False"
