"""What the device implementation does beyond equal ids (see test_hash_reference.py)."""

import numpy as np
import pytest
import torch

from engram.hashing import DeepSeekHash, DeviceHash, QwenHash

CONFIG = {"vocab_size": 97, "heads_per_ngram": 2, "ngram_vocab_size_base": 50, "eos_token_id": 7}


@pytest.fixture
def device():
    return QwenHash(CONFIG).to_device("cpu")


def test_tokens_outside_the_vocabulary_are_noted_until_asked_for(device):
    device.raise_if_seen()
    wrapped = QwenHash(CONFIG, out_of_vocab="wrap").ids(np.array([5, -1, 6]))
    assert device.ids(torch.tensor([5, -1, 6])).tolist() == wrapped.tolist()
    device.ids(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="outside the vocabulary of 97"):
        device.raise_if_seen()
    device.raise_if_seen()
    # Padding and the contexts of empty requests are nobody's.
    starts = torch.tensor([0, 1, 1])
    device.ids(torch.tensor([5, -1]), starts, torch.tensor([[1, 2], [-1, 200]]))
    device.raise_if_seen()
    device.ids(torch.tensor([5, 6]), starts, torch.tensor([[1, 200], [3, 4]]))
    with pytest.raises(ValueError, match="outside the vocabulary"):
        device.raise_if_seen()


def test_the_demo_has_no_rule_above_its_map_but_valid_ids():
    config = {
        "layer_ids": [1],
        "max_ngram_size": 3,
        "n_head_per_ngram": 2,
        "engram_vocab_size": [70, 70],
    }
    h = DeepSeekHash(config, 1, range(10))
    ids = h.to_device("cpu").ids(torch.tensor([10, 3]))
    assert ids[0].tolist() == h.ids([2])[0].tolist()


def test_batches_keep_their_shape(device):
    h = QwenHash(CONFIG)
    batch = torch.tensor([[1, 2, 7], [4, 5, 6]], dtype=torch.int32)
    context = torch.tensor([[3, 4], [7, 1]], dtype=torch.int32)
    assert torch.equal(device.ids(batch, context=context), h.ids(batch, context=context))
    assert torch.equal(device(batch[0], context=context[0]), h.ids(batch[0], context=context[0]))


def test_operations_depend_on_shapes_only(device):
    # Tracing fails on data-dependent control flow and on synchronisation with the host.
    arguments = (
        torch.tensor([1, 2, 7, 4]),
        torch.tensor([0, 1, 4]),
        torch.tensor([[1, 2], [3, 7]]),
    )
    program = torch.export.export(DeviceHash(QwenHash(CONFIG)), arguments)
    other = (torch.tensor([7, 7, 1, 9]), torch.tensor([0, 0, 2]), torch.tensor([[7, 2], [3, 4]]))
    assert torch.equal(program.module()(*other), QwenHash(CONFIG).ids(*other))


def test_arguments_are_checked_by_shape_and_dtype(device):
    tokens = torch.tensor([1, 2, 3])
    for arguments, error, message in [
        ((torch.tensor([1.0]),), TypeError, "tokens: integers are needed, not torch.float32"),
        ((torch.tensor([True]),), TypeError, "tokens: integers are needed, not torch.bool"),
        ((tokens, torch.tensor([0.0, 3.0])), TypeError, "query_start_loc: integers"),
        ((tokens, torch.tensor([[0, 3]])), ValueError, r"\[T\] and \[R \+ 1\]"),
        ((tokens[None], torch.tensor([0, 3])), ValueError, r"\[T\] and \[R \+ 1\]"),
        ((tokens[None, None],), ValueError, "tokens: shape is"),
        ((tokens, None, torch.tensor([[1, 2, 3]])), ValueError, r"context: shape is \(1, 3\)"),
        ((tokens, None, torch.tensor([[1.0, 2.0]])), TypeError, "context: integers"),
        ((tokens, None, None, torch.empty(3, 4)), TypeError, "out: torch.float32"),
        ((tokens, None, None, torch.empty(3, 5, dtype=torch.int64)), ValueError, "out: .*3, 5"),
    ]:
        with pytest.raises(error, match=message):
            device.ids(*arguments)


def test_constants_move_with_the_module_and_stay_out_of_its_state(device):
    assert not device.state_dict()
    assert {buffer.device.type for buffer in device.to("meta").buffers()} == {"meta"}
