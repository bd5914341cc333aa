"""One look-up, wherever the rows are: the same bytes, the same types, the same errors."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from checkpoints import VARIANTS, check_rows, some_ids, views
from hypothesis import given, settings
from hypothesis import strategies as st
from places import CONFIGURATIONS, PLACES, open_place

import engram

MANY = 10_000


@pytest.fixture(scope="module", params=VARIANTS)
def everywhere(request, checkpoint):
    """A table in every place, and a `FileGather` to hold them against."""
    info = checkpoint(request.param)
    table = 0 if len(info.tables) > 1 else None
    storages = {place: open_place(place, info.directory, table) for place in PLACES}
    with engram.FileGather(info.directory, table) as gather:
        yield info.tables[0], gather, storages
    for storage in storages.values():
        storage.close()


def test_ten_thousand_rows_are_the_same_everywhere(everywhere):
    table, gather, storages = everywhere
    ids = some_ids(table.rows, MANY)
    reference = np.empty((MANY, gather.row_bytes), np.uint8)
    gather.gather(ids, reference)
    check_rows(gather.gather(ids), table, ids)
    for place, storage in storages.items():
        found = np.full_like(reference, 0xAA)
        assert storage.lookup(ids, found) is found
        np.testing.assert_array_equal(found, reference, err_msg=place)


@pytest.mark.parametrize("kind", ["numpy", "torch", "list"])
def test_kinds_shapes_and_dtypes_are_those_of_a_gather(everywhere, kind):
    table, gather, storages = everywhere
    ids = some_ids(table.rows, 24).reshape(2, 3, 4)
    given = {"numpy": ids, "torch": torch.from_numpy(ids), "list": ids.tolist()}[kind]
    reference = gather.gather(given)
    for storage in storages.values():
        found = storage.lookup(given)
        assert type(found) is type(reference)
        if isinstance(found, engram.Rows):
            pairs = [(found[name], reference[name]) for name in reference.keys()]  # noqa: SIM118
        else:
            pairs = [(found, reference)]
        for mine, theirs in pairs:
            assert type(mine) is type(theirs)
            assert mine.dtype == theirs.dtype
            assert tuple(mine.shape) == tuple(theirs.shape)
        check_rows(found, table, ids)


def outputs(gather, shape):
    """Everything a gather accepts as `out`."""
    count = int(np.prod(shape))
    side_by_side = np.zeros((*shape, gather.row_bytes), np.uint8)
    yield side_by_side
    yield torch.zeros((*shape, gather.row_bytes), dtype=torch.uint8)
    yield engram.HostBuffer(max(1, gather.planes.nbytes(count)))
    arrays = {
        plane.name: np.zeros((*shape, *plane.row_shape), plane.dtype) for plane in gather.planes
    }
    yield engram.Rows(**arrays) if len(arrays) > 1 else arrays["weight"]


def memory(out):
    if isinstance(out, engram.Rows):
        return b"".join(out[name].tobytes() for name in out.keys())  # noqa: SIM118
    if isinstance(out, torch.Tensor):
        return out.numpy().tobytes()
    return bytes(out) if isinstance(out, engram.HostBuffer) else out.tobytes()


def test_every_kind_of_out_is_filled_alike(everywhere):
    table, gather, storages = everywhere
    ids = some_ids(table.rows, 30).reshape(5, 6)
    wanted = [memory(gather.gather(ids, out)) for out in outputs(gather, ids.shape)]
    for storage in storages.values():
        for out, expected in zip(outputs(gather, ids.shape), wanted, strict=True):
            assert storage.lookup(ids, out) is out
            assert memory(out) == expected


def wrong_calls(gather):
    """Arguments that a gather refuses."""
    rows, row_bytes = gather.num_rows, gather.row_bytes
    good = np.arange(4)
    read_only = np.zeros((4, row_bytes), np.uint8)
    read_only.flags.writeable = False
    yield (np.array([0, rows]),), {}
    yield (np.array([[0, 1], [-1, 2]]),), {}
    yield ([3, -1],), {}
    yield (torch.tensor([rows + 5]),), {}
    yield (np.array([-2]),), {"pad_id": -1}
    yield (np.array([2**63], np.uint64),), {}
    yield (np.array([0.5]),), {}
    yield (np.array([True]),), {}
    yield (torch.tensor([0.5]),), {}
    yield (good, np.zeros((4, row_bytes), np.float64)), {}
    yield (good, np.zeros((3, row_bytes), np.uint8)), {}
    yield (good, np.zeros((4, 2 * row_bytes), np.uint8)[:, ::2]), {}
    yield (good, read_only), {}
    yield (good, [1, 2]), {}
    yield (good, engram.HostBuffer(1)), {}


def test_wrong_arguments_give_the_same_errors(everywhere):
    _, gather, storages = everywhere
    for arguments, keywords in wrong_calls(gather):
        with pytest.raises((IndexError, TypeError, ValueError)) as expected:
            gather.gather(*arguments, **keywords)
        for place, storage in storages.items():
            with pytest.raises(expected.type) as found:
                storage.lookup(*arguments, **keywords)
            if expected.type is ValueError:
                # Worded by whoever notices first; the same thing is wrong.
                words = ("shape", "contiguous", "read-only", "HostBuffer")
                assert [word in str(found.value) for word in words] == [
                    word in str(expected.value) for word in words
                ], place
            else:
                assert str(found.value) == str(expected.value), place
            for attribute in ("path", "table", "row", "position", "offset"):
                assert getattr(found.value, attribute, None) == getattr(
                    expected.value, attribute, None
                ), (place, attribute)
        # The next good call works.
        for storage in storages.values():
            assert storage.lookup(np.array([0])) is not None


def test_padding_is_zeros_and_nothing_else_is(everywhere):
    table, gather, storages = everywhere
    ids = some_ids(table.rows, 5_000)
    ids[::7] = -1
    reference = np.empty((len(ids), gather.row_bytes), np.uint8)
    gather.gather(ids, reference, pad_id=-1)
    for storage in storages.values():
        found = np.full_like(reference, 0xAA)
        storage.lookup(ids, found, pad_id=-1)
        np.testing.assert_array_equal(found, reference)
        check_rows(storage.lookup(torch.from_numpy(ids), pad_id=-1), table, ids)
        kept = storage.lookup(np.array([4, 5]), np.full((2, gather.row_bytes), 9, np.uint8))
        padded = storage.lookup(np.array([4, 5]), kept.copy(), pad_id=5)
        np.testing.assert_array_equal(padded[0], kept[0])
        assert not padded[1].any()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_ids_give_the_reference(everywhere, data):
    table, gather, storages = everywhere
    shape = data.draw(st.lists(st.integers(0, 5), max_size=3).map(tuple))
    dtype = data.draw(st.sampled_from([np.int64, np.int32, np.uint32, np.uint64, np.int16]))
    highest = min(table.rows - 1, np.iinfo(dtype).max)
    count = int(np.prod(shape))
    drawn = data.draw(st.lists(st.integers(0, highest), min_size=count, max_size=count))
    ids = np.array(drawn, dtype).reshape(shape)
    reference = np.empty((*shape, gather.row_bytes), np.uint8)
    gather.gather(ids, reference)
    for storage in storages.values():
        out = np.empty_like(reference)
        storage.lookup(ids, out)
        np.testing.assert_array_equal(out, reference)


def test_every_number_a_table_has_is_there(everywhere):
    _, gather, storages = everywhere
    for place, storage in storages.items():
        assert storage.info == gather.info
        for name in ("num_rows", "row_bytes", "row_shape", "dtype", "encoding", "logical_shape"):
            assert getattr(storage, name) == getattr(gather, name)
        assert storage.constants == gather.constants
        kind = {"huge": "pinned", "file": "mapped", "tensor": "device"}.get(place, place)
        held = storage.nbytes
        assert held.pop(kind) >= gather.nbytes
        assert set(held.values()) == {0}
        stats = storage.stats()
        assert stats["nbytes"] == storage.nbytes
        assert stats["loaded"]
        assert storage.info.name in repr(storage)
        dequantised = engram.dequantize(storage.lookup(np.array([1, 2])), storage)
        assert dequantised.shape == (2, *gather.logical_shape)


@pytest.mark.parametrize("place", PLACES)
def test_many_threads_may_look_up_at_once(place, checkpoint):
    info = checkpoint()
    table = info.tables[0]
    failures = []
    with open_place(place, info.directory) as storage:

        def work(seed):
            try:
                for turn in range(20):
                    ids = some_ids(table.rows, 3_000, seed * 100 + turn)
                    check_rows(storage.lookup(ids), table, ids)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


@pytest.mark.parametrize("place", PLACES)
def test_a_closed_storage_says_so(place, checkpoint):
    storage = open_place(place, checkpoint().directory)
    storage.close()
    storage.close()
    assert storage.closed
    assert set(storage.nbytes.values()) == {0}
    with pytest.raises(ValueError, match="this storage is closed"):
        storage.lookup([1])
    with pytest.raises(ValueError, match="this storage is closed"):
        storage.lookup(np.array([1]), np.zeros((1, storage.row_bytes), np.uint8))
    with pytest.raises(ValueError, match="this storage is closed"):
        storage.load({})


@pytest.mark.parametrize("place", PLACES)
def test_weights_are_loaded_once(place, checkpoint):
    info = checkpoint()
    with open_place(place, info.directory) as storage:
        with pytest.raises(RuntimeError, match="weights are loaded once"):
            storage.load(views(info))
        with (
            engram.FileGather(info.directory) as gather,
            pytest.raises(RuntimeError, match="weights are loaded once"),
        ):
            storage.load(gather)


@pytest.mark.parametrize("place", ["device", "pinned", "huge", "file"])
@pytest.mark.parametrize("variant", ["qwen-fp8", "deepseek-fp8", "longcat-bf16"])
def test_rows_may_come_later_from_views(place, variant, checkpoint):
    info = checkpoint(variant)
    table = info.tables[0]
    announced = engram.tables(info.directory)[0]
    with engram.open_storage(CONFIGURATIONS[place], announced, device="cpu") as storage:
        assert set(storage.nbytes.values()) == {0}, "nothing is allocated before"
        with pytest.raises(RuntimeError, match=r"call load\(views\)"):
            storage.lookup([0])
        tensors = views(info)
        names = sorted(tensors, reverse=True)
        stages = []
        pairs = ((name.replace("language_model.", ""), tensors[name]) for name in names)
        storage.load(pairs, lambda *step: stages.append(step))
        ids = some_ids(table.rows, 500)
        check_rows(storage.lookup(ids), table, ids)
        if place != "file":
            assert stages[-1][1:] == (table.nbytes, table.nbytes)


@pytest.mark.parametrize("place", ["device", "pinned"])
def test_views_that_are_wrong_leave_nothing_loaded(place, checkpoint):
    info = checkpoint("qwen-bf16")
    announced = engram.tables(info.directory)[0]
    tensors = views(info)
    name = next(name for name in tensors if "shard_1." in name)
    wrong = {
        "2 rows": {**tensors, name: tensors[name][:2]},
        "float32": {**tensors, name: tensors[name].float()},
        "1 of ": {key: view for key, view in tensors.items() if key != name},
        "came before": [*tensors.items(), (name, tensors[name])],
        "must be a mapping": 5,
    }
    storage = engram.open_storage(CONFIGURATIONS[place], announced, device="cpu")
    for text, given_views in wrong.items():
        with pytest.raises((engram.CheckpointError, TypeError, ValueError)) as error:
            storage.load(given_views)
        assert text in str(error.value) or "has shape (2, " in str(error.value)
        with pytest.raises(RuntimeError, match=r"call load\(views\)"):
            storage.lookup([0])
    storage.load(tensors)
    ids = some_ids(storage.num_rows, 50)
    check_rows(storage.lookup(ids), info.tables[0], ids)


@pytest.mark.parametrize("place", ["device", "pinned", "file"])
def test_rows_of_another_table_are_refused(place, checkpoint):
    announced = engram.tables(checkpoint("qwen-bf16").directory)[0]
    storage = engram.open_storage(CONFIGURATIONS[place], announced, device="cpu")
    with (
        engram.FileGather(checkpoint("qwen-fp8").directory) as gather,
        pytest.raises(engram.CheckpointError, match="was opened as"),
    ):
        storage.load(gather)


@pytest.mark.case("I32")
def test_the_file_storage_takes_mapped_views_alone(checkpoint):
    info = checkpoint()
    announced = engram.tables(info.directory)[0]
    storage = engram.open_storage({"disk_offload": True}, announced)
    tensors = {name: tensor.clone() for name, tensor in views(info).items()}
    with pytest.raises(ValueError, match="is backed by"):
        storage.load(tensors)
    loader = engram.ViewLoader(info.config)
    for name, tensor in views(info).items():
        loader.add(name, tensor)
    storage.load(loader)
    ids = some_ids(storage.num_rows, 50)
    check_rows(storage.lookup(ids), info.tables[0], ids)


def test_the_file_storage_takes_its_table_out_of_a_loader_with_several(checkpoint):
    info = checkpoint("deepseek-fp8")
    for plain_names in (False, True):
        loader = engram.ViewLoader(info.config)
        for name, tensor in views(info).items():
            loader.add(name.replace("language_model.", "") if plain_names else name, tensor)
        announced = engram.tables(info.directory)
        for place in (1, 0):
            with engram.open_storage({"disk_offload": True}, announced[place]) as storage:
                storage.load(loader)
                ids = some_ids(storage.num_rows, 50)
                check_rows(storage.lookup(ids), info.tables[place], ids)
        again = engram.open_storage({"disk_offload": True}, announced[0])
        with pytest.raises(RuntimeError, match="bound already"):
            again.load(loader)


def test_names_in_a_loader_may_lack_a_segment(checkpoint):
    info = checkpoint()
    announced = engram.tables(info.directory)[0]
    bare = dataclasses.replace(announced, name=announced.name.replace("language_model.", ""))
    for table in (announced, bare):
        for short in (False, True):
            loader = engram.ViewLoader(info.config)
            for name, tensor in views(info).items():
                loader.add(name.replace("language_model.", "") if short else name, tensor)
            with engram.open_storage({"disk_offload": True}, table) as storage:
                storage.load(loader)
                ids = some_ids(storage.num_rows, 50)
                check_rows(storage.lookup(ids), info.tables[0], ids)


def test_what_a_table_may_be(checkpoint):
    info = checkpoint("deepseek-fp8")
    name = info.tables[1].name
    ids = some_ids(info.tables[1].rows, 20)
    gather = engram.FileGather(info.directory, 1)
    loader = engram.ViewLoader(info.config)
    for key, tensor in views(info).items():
        if key.startswith(name):
            loader.add(key, tensor)
    for table in ((info.directory, 1), (str(info.directory), name), gather, loader):
        for config in ({}, {"disk_offload": True}):
            if table is loader and config:
                continue
            with engram.open_storage(config, table, device="cpu") as storage:
                check_rows(storage.lookup(ids), info.tables[1], ids)
    assert not gather.closed, "it stays the caller's"
    with pytest.raises(ValueError, match="2 tables"):
        engram.open_storage({}, info.directory)
    with pytest.raises(TypeError, match="table must be"):
        engram.open_storage({}, 17)
    with pytest.raises(ValueError, match="load_format"):
        engram.open_storage({}, gather, load_format="npcache")


def test_a_failed_open_closes_the_files(checkpoint, monkeypatch):
    from engram.storage import hosted

    closed = []
    original = engram.FileGather.close

    def close(self):
        closed.append(self)
        original(self)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(engram.FileGather, "close", close)
    monkeypatch.setattr(hosted, "fill", fail)
    with pytest.raises(KeyboardInterrupt):
        engram.open_storage({}, checkpoint().directory, device="cpu")
    assert len(closed) == 1


def test_embeddings_come_from_any_place(checkpoint):
    info = checkpoint()
    hasher = engram.hasher(info.directory)
    tokens = torch.from_numpy(np.random.default_rng(0).integers(0, 90, (2, 30)))
    wanted = None
    for place in PLACES:
        with open_place(place, info.directory) as storage:
            module = engram.NgramEmbedding(hasher, storage, dtype=torch.float32)
            values = module(tokens)
        wanted = values if wanted is None else wanted
        torch.testing.assert_close(values, wanted, rtol=0, atol=0)
    assert wanted.abs().sum() > 0
