"""Data-parallel replicas as real processes, which can be held up, watched and killed."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
from checkpoints import some_ids

TIMEOUT = 30.0


class Outcome(NamedTuple):
    """What a replica got: a value, or the type and text of an exception, and its warnings."""

    value: object = None
    error: str = ""
    text: str = ""
    warned: tuple[str, ...] = ()


class Replicas:
    """Replicas `0` to `size - 1` of a server, started together and told when to go.

    Args:
        size: How many.
        directory: For the store's file.
        job: A function of this module, called as `job(topology_arguments, **arguments)`.
        arguments: For every replica; an argument `each_...` has one entry per replica.
    """

    def __init__(self, size, directory, job, **arguments):
        context = multiprocessing.get_context("forkserver")
        # A server that has imported torch gives a process in milliseconds.
        context.set_forkserver_preload(["torch", "torch.distributed", "engram.storage"])
        self.processes, self.pipes = [], []
        store = str(directory / f"store-{time.monotonic_ns()}")
        for rank in range(size):
            given = {
                name.removeprefix("each_"): value[rank] if name.startswith("each_") else value
                for name, value in arguments.items()
            }
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(job, store, rank, size, there, given), daemon=True
            )
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)
        for pipe in self.pipes:
            assert pipe.poll(TIMEOUT), "a replica does not start"
            pipe.recv()

    def go(self):
        """Lets every replica begin."""
        for pipe in self.pipes:
            pipe.send(None)

    def kill(self, rank):
        """Kills one, as nothing can be caught or cleaned up after."""
        os.kill(self.processes[rank].pid, signal.SIGKILL)

    def outcomes(self, patience=TIMEOUT):
        """What each got; the error `"died"` for one that was killed, `"hangs"` for a silent one."""
        deadline = time.monotonic() + patience
        found = []
        for pipe in self.pipes:
            try:
                ready = pipe.poll(max(0.0, deadline - time.monotonic()))
                found.append(pipe.recv() if ready else Outcome(error="hangs"))
            except (EOFError, OSError):  # Killed, perhaps in the middle of its answer.
                found.append(Outcome(error="died"))
        return found

    def close(self):
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(5)
            if process.is_alive():
                process.kill()
                process.join()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def run(size, directory, job, patience=TIMEOUT, **arguments):
    """The outcomes of a job that nobody disturbs."""
    with Replicas(size, directory, job, **arguments) as replicas:
        replicas.go()
        return replicas.outcomes(patience)


def _serve(job, store, rank, size, pipe, arguments):
    import torch.distributed as dist

    topology = {
        "data_parallel_size": size,
        "data_parallel_rank": rank,
        "store": dist.FileStore(store, size),
    }
    pipe.send("here")
    pipe.recv()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            outcome = Outcome(globals()[job](topology, **arguments))
        except BaseException as error:
            outcome = Outcome(None, type(error).__name__, str(error))
            if isinstance(error, AssertionError | AttributeError):
                outcome = outcome._replace(text=traceback.format_exc())
    messages = tuple(str(warning.message) for warning in caught)
    pipe.send(outcome._replace(warned=messages))
    try:
        pipe.recv()  # Until the parent has seen everything: what is shared stays shared so long.
    except EOFError:
        os._exit(0)


def share(
    topology,
    path,
    config=None,
    topology_too=None,
    shared_memory=None,
    slow=0.0,
    fail=None,
    stall=None,
    table=None,
    offer=None,
):
    """Opens a table with the other replicas and looks rows up.

    Args:
        slow: Seconds the loading replica sleeps in the middle.
        fail: Message of the exception that it raises there.
        stall: Seconds a replica sleeps before it comes.
        offer: Changes to what replica 0 offers.
    """
    import engram
    from engram.storage import segment, shared

    if shared_memory is not None:
        segment.SHARED_MEMORY = shared_memory
    if stall:
        time.sleep(stall)
    if slow or fail:
        original = shared.fill

        def fill(buffer, views, info, shard, progress):
            if fail:
                raise OSError(5, fail)
            time.sleep(slow)
            original(buffer, views, info, shard, progress)

        shared.fill = fill
    if offer is not None:
        real = segment.Segment.offer.fget
        segment.Segment.offer = property(lambda self: {**real(self), **offer})
    topology = {"timeout": 10.0, **topology, **(topology_too or {})}
    began = time.monotonic()
    storage = engram.open_storage(config or {}, (path, table), parallel=topology)
    took = time.monotonic() - began
    ids = some_ids(storage.num_rows, 2_000, 7)
    ids[3] = -1
    out = np.empty((len(ids), storage.row_bytes), np.uint8)
    storage.lookup(ids, out, pad_id=-1)
    found = {
        "placement": storage.placement,
        "nbytes": storage.nbytes,
        "fallbacks": storage.fallbacks,
        "rows": out,
        "seconds": took,
        "segments": shared_mappings(),
    }
    globals()["_kept"] = storage
    return found


def retry(topology, path, fail_first=False, attempts=6, **arguments):
    """Opens a table with the other replicas, again until it works.

    Args:
        fail_first: Fail before anything is agreed on, and come back when the others have given up.
    """
    errors = []
    if fail_first:
        errors.append("FileNotFoundError")
        time.sleep(1.5)
    while True:
        try:
            return {**share(topology, path, **arguments), "errors": errors}
        except TimeoutError as error:
            errors.append(type(error).__name__)
            if len(errors) == attempts:
                raise


def share_twice(topology, path):
    """Opens a table twice with the other replicas, and keeps both."""
    share(topology, path)
    globals()["_first"] = globals()["_kept"]
    return share(topology, path)


def _open_in_groups(topology, table, tensor, data, config, **topology_too):
    """Opens a table as one of `tensor * data` ranks of a group."""
    import torch.distributed as dist

    import engram

    rank = topology["data_parallel_rank"]
    dist.init_process_group("gloo", store=topology["store"], rank=rank, world_size=tensor * data)
    parallel = {
        "tensor_parallel_size": tensor,
        "tensor_parallel_rank": rank % tensor,
        "data_parallel_size": data,
        "data_parallel_rank": rank // tensor,
        "groups": engram.new_groups(tensor, data, timeout=20.0),
        "timeout": 20.0,
        **topology_too,
    }
    storage = engram.open_storage(config, table, parallel=parallel, device="cpu")
    globals()["_kept"] = storage
    return storage


def look_up(topology, path, tensor, data, config, steps, table=None, topology_too=None, io="auto"):
    """What each of this replica's look-ups gives: rows, or an exception with its attributes.

    Args:
        steps: Per replica, the ids and the pad id of every step.
    """
    import engram

    gather = engram.FileGather(path, table, io=io)
    storage = _open_in_groups(topology, gather, tensor, data, config, **(topology_too or {}))
    found = []
    for ids, pad in steps[topology["data_parallel_rank"] // tensor]:
        began = time.monotonic()
        try:
            rows = storage.lookup(ids, pad_id=pad)
            parts = [rows.weight, rows.scale] if isinstance(rows, engram.Rows) else [rows]
            flat = [np.ascontiguousarray(part).view(np.uint8) for part in parts]
            found.append(np.concatenate(flat, -1))
        except Exception as error:
            places = ("path", "table", "row", "position", "offset")
            attributes = {name: getattr(error, name, "missing") for name in places}
            found.append((type(error).__name__, str(error), attributes))
        assert time.monotonic() - began < 10, "waited for nobody"
    return {"steps": found, "stats": storage.stats(), "placement": storage.placement}


def exchange(topology, path, tensor, data, config, ids_of_replicas, table=None, pad=None):
    """Looks rows up with `tensor * data` ranks; every replica has ids of its own.

    Args:
        ids_of_replicas: Per replica, the ids of every step.
        pad: The pad id of every look-up.
    """
    import torch
    import torch.distributed as dist

    import engram

    rank = topology["data_parallel_rank"]
    store = topology["store"]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tensor * data)
    groups = engram.new_groups(tensor, data, timeout=20.0)
    replica = rank // tensor
    parallel = {
        "tensor_parallel_size": tensor,
        "tensor_parallel_rank": rank % tensor,
        "data_parallel_size": data,
        "data_parallel_rank": replica,
        "groups": groups,
        "timeout": 20.0,
    }
    storage = engram.open_storage(config, (path, table), parallel=parallel, device="cpu")
    found = []
    for ids in ids_of_replicas[replica]:
        out = np.full((len(ids), storage.row_bytes), 0xAA, np.uint8)
        try:
            storage.lookup(ids, out, pad_id=pad)
            again = storage.lookup(torch.from_numpy(ids), pad_id=pad)
            parts = [again] if not isinstance(again, engram.Rows) else [again.weight, again.scale]
            flat = [part.contiguous().view(torch.uint8) for part in parts]
            assert np.array_equal(torch.cat(flat, 1).numpy(), out)
            found.append(out)
        except (IndexError, RuntimeError) as error:
            found.append((type(error).__name__, str(error)))
    held = storage.nbytes
    shard = (storage.shard.first_row, storage.shard.stop_row)
    globals()["_kept"] = storage
    return {"rows": found, "placement": storage.placement, "nbytes": held, "shard": shard}


def shared_mappings():
    """Device and inode of the nameless files that this process maps shared."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = [line.split() for line in lines if " rw-s " in line and "/#" in line]
    return sorted({(fields[3], fields[4]) for fields in found})
