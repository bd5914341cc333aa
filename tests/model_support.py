"""Tiny Qwen4-Exp models, and their references with tables in memory."""

from __future__ import annotations

import contextlib
import json
import shutil

import torch
import transformers
from safetensors.torch import load_file, save_file

from engram import synth

SCALE = 0.000199
SHARD = ".ngram_embedding.shard_"


def rewritten(source, target, change):
    """A copy of a checkpoint with `change` applied to every file's tensors."""
    shutil.copytree(source, target)
    index_path = target / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    for path in sorted(target.glob("*.safetensors")):
        tensors = change(load_file(path))
        save_file(tensors, path, metadata={"format": "pt"})
        index["weight_map"].update(dict.fromkeys(tensors, path.name))
    index_path.write_text(json.dumps(index))
    return target


def as_fp8(tensors):
    """Tables in FP8 with one scale per table, beside the first piece."""
    found = {}
    for name, tensor in tensors.items():
        if SHARD in name:
            # Scaled so that the values use all of FP8's range.
            tensor = (tensor.float() / SCALE).clamp(-448, 448).to(torch.float8_e4m3fn)
            if f"{SHARD}0." in name:
                scale = name.split(SHARD)[0] + ".ngram_embedding.weight_scale"
                found[scale] = torch.tensor([SCALE], dtype=torch.bfloat16)
        found[name] = tensor
    return found


def dequantised(tensors):
    """The same tables in BF16, as one rounding of code times scale."""
    scale = torch.tensor(SCALE, dtype=torch.bfloat16).float()
    return {
        name: (tensor.float() * scale).to(torch.bfloat16) if SHARD in name else tensor
        for name, tensor in tensors.items()
        if not name.endswith(".weight_scale")
    }


@contextlib.contextmanager
def single_thread():
    """No progress bars, and no threads that spin for each other where cores are shared."""
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_directories(folder):
    """By encoding: a checkpoint to serve, and one whose tables transformers reads right."""
    bf16 = synth.write_model(folder / "bf16")
    fp8 = rewritten(bf16, folder / "fp8", as_fp8)
    return {"bf16": (bf16, bf16), "fp8": (fp8, rewritten(fp8, folder / "plain", dequantised))}


def tables_of(model):
    return [layer.ple.ple_embedding for layer in model.model.language_model.layers if layer.ple]


def text(*lines):
    return [list(line.encode()) for line in lines]


def left_padded(rows, pad):
    length = max(map(len, rows))
    ids = torch.tensor([[pad] * (length - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


PROMPTS = text("Once upon a time", "a", "The table needs sixteen tiny rows per token. ", "xy")
END = 256
