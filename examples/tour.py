"""A tour of engram: every public name, used once, on checkpoints made for the occasion.

    python examples/tour.py

Takes some seconds on a CPU and a few megabytes in a temporary folder. Needs torch, and safetensors
for the part with a loader; metrics are shown where prometheus_client is installed. Each function is
one stop, and can be read by itself.
"""

import contextlib
import json
import logging
import sys
import tempfile
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import torch

import engram
from engram import synth

TOKENS = [9707, 11, 1879, 0]


def look(path: Path) -> None:
    """What is in a checkpoint: tables, their planes, and the pieces that planes are stored in."""
    for table in engram.tables(path):
        assert isinstance(table, engram.TableInfo)
        print(f"{table.name}: {table.family}, layer {table.layer}, {table.rows} rows")
        print(f"  {table.encoding}, {table.row_bytes} bytes per row, {table.bytes} in all")
        print(f"  values per row {table.logical_shape}, constants {table.constants}")
        assert isinstance(table.planes, engram.Planes)
        assert len(table.files) > 1
        print(f"  a buffer for 100 rows has {table.planes.nbytes(100)} bytes")
        for plane in table.planes:
            assert isinstance(plane, engram.PlaneInfo)
            print(f"  plane {plane.name}: {plane.stored_dtype} as {plane.dtype}, {plane.row_shape}")
            assert plane.offset(100) == 0
            assert plane.before == ()
            print(f"    {plane.row_bytes} bytes per row")
            piece = plane.pieces[0]
            assert isinstance(piece, engram.PieceInfo)
            print(f"    {piece.tensor} holds rows from {piece.first_row} on, {piece.rows} of them,")
            print(f"    at byte {piece.offset} of {Path(piece.file).name}")


def read(path: Path) -> None:
    """Rows for ids, now and later, and what is known of the table they come from."""
    with engram.FileGather(path, io="auto") as gather:
        assert gather.info.rows == gather.num_rows
        assert len(gather.files) > 1
        assert gather.nbytes == gather.num_rows * gather.row_bytes
        assert gather.planes[0].row_shape == gather.row_shape == gather.logical_shape
        print(gather.dtype, gather.encoding, gather.constants)
        rows = gather.gather([[3, 1, 4], [1, 5, -1]], pad_id=-1)
        assert rows.shape == (2, 3, *gather.row_shape)

        # Rows that will be wanted soon: read ahead, or gathered while something else is done.
        gather.prefetch([17, 18])
        ticket = gather.submit([17, 18], deadline=30.0)
        assert isinstance(ticket, engram.Ticket)
        later = ticket.wait(timeout=30.0)
        assert ticket.done()
        assert (later == gather.gather([17, 18])).all()
        unwanted = gather.submit([19])
        unwanted.cancel()
        with contextlib.suppress(CancelledError):  # unless it had been served already
            unwanted.wait()

        # Memory of one's own, at an address that never changes.
        buffer = engram.HostBuffer(gather.planes.nbytes(2))
        gather.gather([17, 18], out=buffer)
        assert buffer.capacity >= buffer.nbytes
        assert buffer.address % 4096 == 0
        buffer.prefault(0, buffer.nbytes)
        with contextlib.suppress(OSError):  # where the kernel has neither memory nodes nor these
            buffer.place([0], interleave=False)
            buffer.collapse(0, buffer.nbytes)
        with contextlib.suppress(RuntimeError):  # without CUDA
            buffer.pin()
            print("seen by the device at", buffer.device_address)
            buffer.unpin()
        buffer.store_word(0, 7)  # four bytes at once, for those who look on meanwhile
        assert buffer.load_word(0) == 7
        print("huge pages", buffer.huge_pages, "pinned", buffer.is_pinned)

        print(gather.prewarm(max_bytes=1 << 30), "bytes read into the page cache")
        found = gather.residency()
        assert isinstance(found, engram.Residency)
        print(f"{found.resident} of {found.pages} pages of {found.page_bytes} bytes in memory,")
        print(f"{found.share} of them, {found.believed} believed to be")
        # Rows kept in memory, and which they are over a restart.
        gather.resize("1MiB")
        gather.gather([17, 18])
        hot = path.with_name("hot")
        print(gather.save_hot(hot), "rows listed,", gather.load_hot(hot), "of them in the cache")
        gather.reopen()
        print("runs", gather.stats()["io"]["runs"])
    assert gather.closed
    print(engram.drop_cache(gather.files), "bytes stayed in the page cache")


def budget(path: Path) -> None:
    """Rows kept within a budget, for tables that memory cannot hold."""
    with tempfile.TemporaryDirectory() as folder:
        hot = Path(folder, "hot-rows")
        with engram.FileGather(path, cache_bytes="4MiB") as gather:
            gather.gather(range(1000))
            gather.gather(range(1000))
            found = gather.stats()["cache"]
            assert found["hits"] == found["misses"] == 1000
            print(f"{found['rows']} rows of {found['capacity']} in {found['budget_bytes']} bytes")
            print(gather.save_hot(hot), "rows listed for the next start")
            gather.resize("1MiB")  # those wanted most stay
        with engram.FileGather(path, cache_bytes="4MiB") as gather:
            loaded = gather.load_hot(hot, progress=lambda done, total: None)
            gather.gather(range(1000))
            print(loaded, "rows loaded,", gather.stats()["cache"]["misses"], "missed afterwards")


def watch(path: Path) -> None:
    """Numbers for Prometheus, where prometheus_client is installed."""
    try:
        from prometheus_client import CollectorRegistry, generate_latest

        from engram import metrics
    except ModuleNotFoundError as missing:
        print(missing)
        return
    registry = CollectorRegistry()
    with engram.FileGather(path) as gather:
        registry.register(metrics.PrometheusCollector(gather))
        gather.gather([1, 2, 3])
        lines = generate_latest(registry).decode().splitlines()
    print(next(line for line in lines if line.startswith("engram_rows_total")))


def verify(path: Path) -> None:
    """Whether the files are what they were, and what is said when they are not."""
    with engram.FileGather(path) as gather:
        found = gather.verify(rows=64)
        assert isinstance(found, engram.Verification)
        assert found.ok
        print(f"{found.rows} rows read in {len(found.ways)} ways; shadowed: {found.shadowed}")
        file = Path(gather.files[0])
        whole = file.read_bytes()
        file.write_bytes(whole[:-1000])
        found = gather.verify(rows=64)
        problem = found.problems[0]
        assert isinstance(problem, engram.Problem)
        print(f"{problem.kind} in {problem.path}, row {problem.row}, byte {problem.offset}:")
        print(f"  {problem.message} ({found.more} more problems)")
    try:
        engram.FileGather(path)
    except engram.CheckpointError as error:
        print(f"refused: {error}")
    file.write_bytes(whole)


def hash_tokens(path: Path) -> None:
    """Tokens to row ids, and both steps in one call."""
    hasher = engram.hasher(path)
    history = engram.TokenHistory(hasher)
    history.start("request", TOKENS[:2])
    ids = hasher.ids(TOKENS[2:], context=history.contexts(["request"]))
    history.commit("request", TOKENS[2:])
    assert history.length("request") == 4
    history.truncate("request", 3)
    history.drop("request")
    with engram.FileGather(path) as gather:
        context = [TOKENS[:2]]
        rows = engram.gather_tokens(hasher, gather, TOKENS[2:], context=context)
        assert (rows == gather.gather(ids)).all()
        # Stored bytes to values, once or again and again.
        values = engram.dequantize(rows, gather, "float32")
        assert (engram.Dequantizer(gather, "float32")(rows) == values).all()
        print(f"{len(TOKENS)} tokens, {ids.shape[1]} rows each, {values.dtype} values")


def several_tables(path: Path) -> None:
    """The tables of a model in one round of reads; rows of several planes."""
    with engram.TableSet(path) as tables:
        ids = {name: [0, 1, 2] for name in tables.gathers}
        for name, rows in tables.gather(ids).items():
            assert isinstance(rows, engram.Rows)
            assert rows.bias is None
            print(f"{name}: planes {list(rows.keys())}, {rows.weight.shape}, {rows.scale.shape}")
        tables.submit(ids).wait()
        first = engram.FileGather(path, 0)
        first.close()  # what leaving a `with` does
        assert first.closed


def step(path: Path) -> None:
    """A server's step: rows in fixed buffers, and the module that reads them."""
    hasher = engram.hasher(path)
    with (
        engram.FileGather(path) as gather,
        engram.Stage(gather, hasher, max_tokens=8, device="cpu") as stage,
    ):
        stage.prefetch(TOKENS)
        assert stage.prepare(TOKENS) == stage.tokens == len(TOKENS) <= stage.max_tokens
        stage.join()
        embedding = engram.NgramEmbedding(hasher, dtype=torch.float32)
        embedding.bind_stage(stage)
        staged = embedding(torch.zeros(len(TOKENS), dtype=torch.int64))
        stage.release()
        print(stage.tables, stage.rows().shape, stage.stats())

        # For a graph that is launched first, and waits for its rows where the device can.
        late = stage.late(tokens=8)
        late.launch(lambda: embedding(torch.zeros(8, dtype=torch.int64)))
        late.fill(TOKENS)
        late.finish()
        print("waits on the device:", late.waits, late.reason)
        assert stage.gather_of() is gather
        assert stage.hasher_of() is hasher

        plain = engram.NgramEmbedding(hasher, dtype=torch.float32)
        plain.bind(gather)
        assert torch.equal(plain(torch.tensor([TOKENS]))[0], staged)
        zeros = engram.NgramEmbedding(hasher, dtype=torch.float32)
        zeros.bind_dummy()
        assert not zeros(torch.tensor([TOKENS])).any()


def places(path: Path) -> None:
    """Where a table lives, decided by a configuration; tables from a loader's views."""
    config = engram.EngramConfig(disk_offload=True)
    assert engram.EngramConfig.from_json('{"host_file_gather": true}') == config
    assert engram.EngramConfig.from_json(config.to_json()) == config
    assert engram.EngramConfig.from_dict(config.to_dict()) == engram.EngramConfig.of(config)
    assert engram.EngramConfig.from_json(config.to_json()) == config
    parallel = {"data_parallel_size": 1}
    model = json.loads((path / "config.json").read_text())
    assert engram.model_has_engram_layers(model)
    config.verify_model_config(model, platform="cpu")
    config.resolve_dp_shared_memory(parallel)
    config.verify_parallel_config(parallel)
    print(f"placement {config.placement} over {config.get_parallel_size(parallel)} rank(s)")
    print("digest", config.compute_hash(), "shared", config.dp_shared_memory_required)
    settings = [config.cpu_offload, config.disk_offload, config.host_file_gather, config.use_thp]
    print(settings, config.embedding_across_dp, config.dp_shared_memory)

    with engram.open_storage(config, path) as storage:
        wanted = storage.lookup([1, 2, 3])
    from safetensors import safe_open

    views = {}
    for file in path.glob("*.safetensors"):
        opened = safe_open(file, framework="pt")
        views |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    loader = engram.ViewLoader(model)
    for name, view in views.items():
        loader.add(name, view)
    print("tensors of tables:", len(dict(loader.items())))
    with (
        loader.bind() as bound,
        engram.FileGather.from_views(views, num_rows=bound.num_rows) as again,
    ):
        assert (bound.gather([1, 2, 3]) == wanted).all()
        assert (again.gather([1, 2, 3]) == wanted).all()


def ranks(path: Path) -> None:
    """A table over the ranks of torch.distributed; here there is one rank."""
    with engram.FileGather(path) as gather, tempfile.TemporaryDirectory() as folder:
        middle = engram.Shard.of(gather, rank=1, world_size=3)
        print(f"rank {middle.rank} of {middle.world_size} owns {middle.num_local_rows} rows,")
        print(f"{middle.first_row} to {middle.stop_row} of {middle.num_rows}: {middle.starts}")
        ids = np.array([0, middle.first_row])
        assert middle.owns(ids).tolist() == [False, True]
        assert middle.owner(ids).tolist() == [0, 1]
        assert middle.to_global(middle.to_local(ids)).tolist() == [-1, middle.first_row]

        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        try:
            groups = engram.new_groups(tensor_parallel_size=1)
            assert isinstance(groups, engram.Groups)
            assert (groups.size, groups.rank) == (1, 0)
            assert groups.tensor is groups.data is groups.node is None
            shard = engram.Shard.of(gather, groups.rank, groups.size)

            def lookup(ids: torch.Tensor) -> torch.Tensor:
                rows = torch.empty((len(ids), gather.row_bytes), dtype=torch.uint8)
                return gather.gather(ids, out=rows)

            ids = torch.tensor([5, 6, 7])
            sharded = engram.ShardedLookup(shard, lookup, gather.row_bytes, groups)
            once = engram.ReadOncePerNode(lookup, gather.row_bytes, groups.within_replica())
            assert torch.equal(sharded(ids), lookup(ids))
            assert torch.equal(once(ids), lookup(ids))
            with contextlib.suppress(IndexError):  # what a rank without usable ids does instead
                sharded.refuse(IndexError("these are no row ids"))
            print(sharded.stats(), once.stats())
        finally:
            torch.distributed.destroy_process_group()


def main() -> None:
    """Goes to every stop."""
    logging.basicConfig(stream=sys.stdout, format="  log: %(message)s")
    print("engram", engram.__version__)
    with tempfile.TemporaryDirectory() as folder:
        qwen = synth.write(Path(folder, "qwen"), "qwen", rows=5000, dtype="fp8").directory
        deepseek = synth.write(Path(folder, "deepseek"), "deepseek", rows=3000).directory
        for stop in (look, read, budget, watch, verify, hash_tokens, step, places, ranks):
            print(f"\n== {stop.__name__}: {stop.__doc__}")
            stop(qwen)
        print(f"\n== {several_tables.__name__}: {several_tables.__doc__}")
        several_tables(deepseek)


if __name__ == "__main__":
    main()
