"""Which models have n-gram tables, and which platform a process is on."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engram import model_config
from engram.config import EngramConfig, model_has_engram_layers
from engram.model_config import detect_platform

QWEN = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "text_config": {"ple_layer_ids": [2]},
}


@dataclasses.dataclass
class VllmModelConfig:
    """The attributes of vLLM's ModelConfig that matter here."""

    architecture: str
    hf_text_config: object
    hf_config: object = None

    @property
    def architectures(self):
        return [self.architecture]


class TransformersConfig(SimpleNamespace):
    def get_text_config(self):
        return getattr(self, "text_config", self)


FIELDS = [
    ("DeepseekV41ForCausalLM", "engram_layer_ids", [1, 14], []),
    ("Qwen4ExpForCausalLM", "ple_layer_ids", [2], []),
    ("Qwen4ExpForConditionalGeneration", "ple_layer_ids", (2, 5), ()),
    ("LongcatFlashNgramForCausalLM", "ngram_vocab_size_ratio", 78, 0),
    ("LongcatFlashNgramForCausalLM", "ngram_vocab_size_ratio", 0.5, -1),
]
SHAPES = {
    "vllm": lambda name, text: VllmModelConfig(name, SimpleNamespace(**text)),
    "vllm over transformers": lambda name, text: SimpleNamespace(
        hf_config=TransformersConfig(architectures=[name], text_config=SimpleNamespace(**text))
    ),
    "transformers nested": lambda name, text: TransformersConfig(
        architectures=[name], text_config=SimpleNamespace(**text)
    ),
    "transformers flat": lambda name, text: TransformersConfig(architectures=[name], **text),
    "dict nested": lambda name, text: {"architectures": [name], "text_config": text},
    "dict flat": lambda name, text: {"architectures": [name], **text},
    "dict, named inside": lambda name, text: {"text_config": {"architectures": [name], **text}},
}


@pytest.mark.parametrize(("architecture", "field", "present", "absent"), FIELDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_models_are_recognised_by_their_field(architecture, field, present, absent, shape):
    config = EngramConfig()
    model = SHAPES[shape](architecture, {field: present})
    assert model_has_engram_layers(model) is True
    config.verify_model_config(model, platform="cpu")

    for text, found in (({}, "is absent"), ({field: None}, "is absent"), ({field: absent}, "is ")):
        model = SHAPES[shape](architecture, text)
        assert model_has_engram_layers(model) is False
        with pytest.raises(ValueError, match=field) as refusal:
            config.verify_model_config(model, platform="cpu")
        assert architecture in str(refusal.value)
        assert found in str(refusal.value)


@pytest.mark.parametrize(
    ("architecture", "field", "value"),
    [
        ("Qwen4ExpForCausalLM", "ple_layer_ids", 2),
        ("Qwen4ExpForCausalLM", "ple_layer_ids", "2"),
        ("DeepseekV41ForCausalLM", "engram_layer_ids", True),
        ("LongcatFlashNgramForCausalLM", "ngram_vocab_size_ratio", True),
        ("LongcatFlashNgramForCausalLM", "ngram_vocab_size_ratio", [78]),
        ("LongcatFlashNgramForCausalLM", "ngram_vocab_size_ratio", "78"),
        ("LongcatFlashNgramForCausalLM", "ngram_vocab_size_ratio", float("nan")),
    ],
)
def test_a_field_of_the_wrong_kind_announces_no_table(architecture, field, value):
    model = {"architectures": [architecture], field: value}
    assert not model_has_engram_layers(model)
    with pytest.raises(ValueError, match=field):
        EngramConfig().verify_model_config(model, platform="cpu")


def test_a_path_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    for path in (tmp_path, str(tmp_path), str(tmp_path / "config.json")):
        assert model_has_engram_layers(path) is True
        EngramConfig().verify_model_config(path, platform="cpu")
    (tmp_path / "config.json").write_text("{}")
    assert model_has_engram_layers(str(tmp_path)) is False
    for wrong in (tmp_path / "no-model", "no-model", ""):
        with pytest.raises(FileNotFoundError):
            model_has_engram_layers(wrong)


def test_no_model_is_refused():
    assert model_has_engram_layers(None) is False
    with pytest.raises(ValueError, match="no model configuration"):
        EngramConfig().verify_model_config(None, platform="cpu")


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ({"architectures": ["LlamaForCausalLM"], "ple_layer_ids": [2]}, "'LlamaForCausalLM'"),
        ({"architectures": ["A", "B"]}, "'A', 'B'"),
        ({"ple_layer_ids": [2]}, "no architecture"),
        ({}, "no architecture"),
        (object(), "no architecture"),
        # vLLM's resolved architecture decides over the checkpoint's own list.
        (
            VllmModelConfig("TransformersForCausalLM", None, TransformersConfig(**QWEN)),
            "'TransformersForCausalLM'",
        ),
    ],
)
def test_unknown_architectures_are_refused(model, found):
    assert model_has_engram_layers(model) is False
    with pytest.raises(ValueError, match="LongcatFlashNgramForCausalLM") as refusal:
        EngramConfig().verify_model_config(model, platform="cpu")
    assert f"got {found};" in str(refusal.value)


def test_real_transformers_configurations_are_recognised():
    module = pytest.importorskip("transformers.models.qwen4_exp.configuration_qwen4_exp")
    text = module.Qwen4ExpTextConfig(ple_layer_ids=[2], eos_token_id=7)
    whole = module.Qwen4ExpConfig(text_config=text.to_dict())
    for model in (text, whole, text.to_dict(), whole.to_dict()):
        assert model_has_engram_layers(model)
    assert not model_has_engram_layers(module.Qwen4ExpTextConfig(eos_token_id=7))


# --- the platform

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
