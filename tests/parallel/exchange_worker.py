"""What the processes of `process_group` run: each function is one rank's part of a check."""

from __future__ import annotations

import datetime
import os
import signal
import time

import numpy as np
import torch
import torch.distributed as dist
from process_group import TABLE, Outcome, table_of

from engram.exchange import ReadOncePerNode, ShardedLookup
from engram.parallel import Shard, new_groups


def serve(rank, size, rendezvous, pipe):
    """Runs what the parent sends until it closes the pipe."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),
    )
    while True:
        try:
            name, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            # Without goodbyes: groups that were broken on purpose would wait for one another.
            os._exit(0)
        try:
            outcome = Outcome(globals()[name](**arguments))
        except Exception as error:
            attributes = {
                name: getattr(error, name) for name in ("row", "position") if hasattr(error, name)
            }
            outcome = Outcome(None, type(error).__name__, str(error), attributes)
        pipe.send(outcome)


_groups = {}
_kept = {}


def groups_for(tensor, data, ranks, host=None, timeout=20.0, tag=""):
    """Groups are made once per topology; a test that breaks them asks for its own by `tag`."""
    key = (tensor, data, tuple(ranks), tag)
    if key not in _groups:
        _groups[key] = new_groups(tensor, data, ranks=ranks, host=host, timeout=timeout)
    return _groups[key]


def exchange(
    tensor,
    data,
    steps,
    ranks=None,
    table=TABLE,
    by="rows",
    head_offsets=None,
    lookup_ids="local",
    slot_ids=None,
    as_tensor=False,
    fail_at=None,
    die_at=None,
    slow_at=None,
    timeout=10.0,
    tag="",
    keep=None,
):
    """Looks up the ids of every step; gives the rows, or the error, of each, and the counts.

    `fail_at`, `die_at`: the look-up with this number raises, or ends the process.
    `slow_at`: (look-up, seconds) sleeps there.
    """
    groups = groups_for(tensor, data, ranks, tag=tag)
    if groups is None:
        return None
    whole = torch.from_numpy(table_of(*table))
    shard = Shard.of(table[1], groups.rank, groups.size, by, head_offsets=head_offsets)
    stored = whole[shard.first_row : shard.stop_row].clone() if lookup_ids == "local" else whole
    calls = []

    def lookup(ids):
        calls.append(ids)
        if fail_at == len(calls):
            raise OSError(5, "Input/output error", "model.safetensors")
        if die_at == len(calls):
            os.kill(os.getpid(), signal.SIGKILL)
        if slow_at and slow_at[0] == len(calls):
            time.sleep(slow_at[1])
        return stored[ids]

    lookup_rows = _kept.get(keep)
    if lookup_rows is None:
        lookup_rows = ShardedLookup(
            shard,
            lookup,
            table[2],
            groups,
            lookup_ids=lookup_ids,
            slot_ids=slot_ids,
            timeout=timeout,
        )
        if keep:
            _kept[keep] = lookup_rows
    results = []
    for ids in steps:
        given = torch.from_numpy(ids) if as_tensor and isinstance(ids, np.ndarray) else ids
        try:
            rows = lookup_rows(given)
            results.append(rows.numpy() if as_tensor else rows)
        except Exception as error:
            place = {name: getattr(error, name, None) for name in ("row", "position")}
            results.append(Outcome(None, type(error).__name__, str(error), place))
    return results, lookup_rows.stats()


def describe_groups(tensor, data, ranks=None, host=None, tag=""):
    """The members of each group, and this rank's place."""
    groups = groups_for(tensor, data, ranks, host, tag=tag)
    if groups is None:
        return None
    members = [
        None if group is None else dist.get_process_group_ranks(group)
        for group in (groups.tensor, groups.data, groups.node)
    ]
    return members, groups.rank, groups.size


def misplaced_shard(tensor, data, ranks=None):
    """A shard that every rank believes to be number 0."""
    groups = groups_for(tensor, data, ranks)
    if groups is not None:
        ShardedLookup(Shard.of(101, 0, groups.size), lambda ids: ids, 16, groups)


def read_once(
    tensor,
    steps,
    ranks=None,
    host=None,
    table=TABLE,
    fail_at=None,
    stay_away=False,
    timeout=10.0,
    tag="",
):
    """Reads every step's ids through the node's reader."""
    groups = groups_for(tensor, 1, ranks, host, tag=tag)
    if groups is None or stay_away:
        return None
    whole = table_of(*table)
    calls = []

    def lookup(ids):
        calls.append(ids)
        if fail_at == len(calls):
            raise OSError(5, "Input/output error", "model.safetensors")
        return whole[ids.numpy()]

    reader = ReadOncePerNode(lookup, table[2], groups, timeout=timeout)
    results = []
    for ids in steps:
        try:
            results.append(reader(ids))
        except Exception as error:
            results.append(Outcome(None, type(error).__name__, str(error)))
    return results, reader.stats(), len(calls)
