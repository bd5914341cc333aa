"""The same table in every place it can live."""

from __future__ import annotations

import torch.distributed as dist

import engram
from engram.storage.device import DeviceStorage
from engram.storage.shared import SharedStorage
from engram.storage.topology import Topology

PLACES = ("device", "tensor", "pinned", "huge", "shared", "file")

CONFIGURATIONS = {
    "device": {"cpu_offload": False},
    "pinned": {},
    "huge": {"use_thp": True},
    "file": {"disk_offload": True},
}


def open_place(place, path, table=None):
    """The table of a checkpoint, in one of `PLACES`, on the CPU."""
    if place == "shared":
        gather = engram.FileGather(path, table)
        storage = SharedStorage(gather.info, topology=alone(), required=True)
        storage.load(gather)
        gather.close()
        return storage
    if place == "tensor":
        # As on an accelerator, with torch's CPU standing in for one.
        gather = engram.FileGather(path, table)
        storage = DeviceStorage(gather.info, device="cpu")
        storage.load(gather)
        gather.close()
        return storage
    return engram.open_storage(CONFIGURATIONS[place], (path, table), device="cpu")


def alone():
    """The place of the only replica of a server, which can still share with itself."""
    return Topology(data_parallel_size=1, data_parallel_rank=0, store=dist.HashStore())
