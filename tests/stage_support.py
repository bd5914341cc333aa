"""Checkpoints and copiers for tests of staging."""

from __future__ import annotations

import numpy as np
import torch

import engram
from engram import HostBuffer

SIZES = {
    "qwen": {"rows": 5000, "layers": 2, "config": {"ple_embed_dim": 256}},
    "deepseek": {"rows": 10_000, "layers": 2, "config": {"engram_head_dim": 64, "hidden_size": 16}},
}
TOKEN_MAP = np.arange(129_280) % 99_092


class Opened:
    """Tables of a synthetic checkpoint, their hashes and the rows they must give."""

    def __init__(self, info, family, **options):
        self.info = info
        self.tables = engram.TableSet(info.directory)
        token_map = TOKEN_MAP if family == "deepseek" else None
        self.hashers = [
            engram.hasher(info.directory, place, token_map=token_map, **options)
            for place in range(len(info.tables))
        ]

    def expected(self, place, tokens, starts=None, context=None):
        """Stored bytes `[owned tokens, heads * row_bytes]` of each plane."""
        if starts is not None:
            tokens = tokens[: starts[-1]]
        ids = np.asarray(self.hashers[place].ids(tokens, starts, context))
        planes = self.info.tables[place].expected(ids)
        return {
            name: rows.reshape(len(tokens), np.prod(rows.shape[1:]))
            for name, rows in planes.items()
        }


def step(hasher, seed, tokens=20, requests=5, padding=0):
    """A step of `requests` requests, some of them empty, with junk behind the last."""
    random = np.random.default_rng(seed)
    cuts = np.sort(random.integers(0, tokens + 1, requests - 1))
    starts = np.concatenate([[0], cuts, [tokens]]).astype(np.int32)
    values = random.integers(0, hasher.vocab_size, tokens + padding)
    values[random.random(len(values)) < 0.1] = hasher.filler
    values[tokens:] = -(2**40)
    context = random.integers(0, hasher.vocab_size, (requests, hasher.context_len))
    return values, starts, context


def assert_rows(stage, opened, arguments):
    """The fixed buffers hold the rows of `arguments`, and zeros behind them."""
    owned = len(arguments[0]) if arguments[1] is None else int(arguments[1][-1])
    for place in range(len(opened.hashers)):
        rows = stage.rows(place)
        for name, wanted in opened.expected(place, *arguments).items():
            plane = rows if isinstance(rows, torch.Tensor) else rows[name]
            held = plane.cpu().view(torch.uint8).reshape(len(plane), -1).numpy()
            assert np.array_equal(held[:owned], wanted), (place, name)
            assert not held[owned:].any(), (place, name)


def addresses(stage):
    found = []
    for place in range(len(stage.tables)):
        rows = stage.rows(place)
        planes = [rows] if isinstance(rows, torch.Tensor) else [rows[key] for key in rows.keys()]  # noqa: SIM118
        found += [plane.data_ptr() for plane in planes]
    return found


class LateFence:
    def __init__(self, copier, number):
        self.copier = copier
        self.number = number
        self.asked = 0

    def done(self):
        self.asked += 1
        if self.asked > self.copier.polls:
            self.copier.run(self.number)
        return self.copier.finished >= self.number


class LateCopier:
    """Copies when somebody has asked for it often enough, and not before, as a device would.

    What it reads from the host it reads then: a slot that was filled again too early gives rows of
    the wrong step.
    """

    name = "late"

    def __init__(self, polls=2):
        self.polls = polls
        self.queue = []
        self.finished = 0
        self.submitted = 0
        self.is_capturing = False
        self.log = []
        self.landed = []
        self.lies = False

    def host(self, nbytes, *, pin):
        return HostBuffer(nbytes)

    def capturing(self):
        return self.is_capturing

    def upload(self, copies, zeros, slot):
        self.submitted += 1
        self.queue.append((self.submitted, list(copies), list(zeros)))
        self.log.append(("upload", slot))
        if self.lies:
            self.polls = -1
            return LateFence(self, -1)
        return LateFence(self, self.submitted)

    def download(self, copies):
        self.log.append(("download", len(copies)))
        for target, source in copies:
            target.copy_(source.real_values)
        return LateFence(self, 0)

    def run(self, number):
        while self.queue and self.queue[0][0] <= number:
            self.finished, copies, zeros = self.queue.pop(0)
            for target, source in copies:
                target.copy_(source)
            for target in zeros:
                target.zero_()
            self.landed.append([target.clone() for target, _ in copies])

    def flush(self):
        self.run(self.submitted)

    def read(self):
        self.log.append(("read",))

    def reread(self):
        self.log.append(("reread",))

    def join(self):
        self.log.append(("join",))
        self.flush()
