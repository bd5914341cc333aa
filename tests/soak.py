"""Ten minutes of everything at once: crowds, caches, memory pressure, failing files, forks.

    python tests/soak.py [--seconds 600] [--seed 0] [--directory DIR]

Where a memory control group can be made, all of it runs in one that is smaller than what is asked
of it. Every row that comes back is compared with what was stored. A row may be refused where a
fault was injected; a wrong row, an unexpected exception, more memory than the budgets of caches
allow, or memory, descriptors or threads that keep growing end it with exit code 1.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import engram
from engram import synth

sys.path.append(str(Path(__file__).parent / "faults"))

from faulty_filesystem import FaultyFilesystem, why_not

IO_MODES = ("auto", "auto", "mmap", "pread", "uring", "direct")
SIZES = (1, 16, 48, 256, 2000, 6000)

CACHED = ("auto", "direct")
"""How gathers with a cache of rows read."""

BUDGETS = (20_000, 1 << 20, 8 << 20, 34 << 20)


@dataclass
class Subject:
    """A table under test: what is stored, where it is opened, and whether it may fail."""

    info: synth.SynthInfo
    directory: Path
    faulty: bool = False
    gathers: list[engram.FileGather] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class SmallGroup:
    """A memory control group for this process, where one can be made."""

    LIMIT = 1280 << 20
    """Room for a forked child beside its parent: pages that either writes are there twice."""

    def __init__(self) -> None:
        self.home: Path | None = None
        self.made: Path | None = None
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if "memory" in controllers.split(","):
                root, limit = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
            elif not controllers:
                root, limit = Path("/sys/fs/cgroup"), "memory.max"
            else:
                continue
            home = root / group.lstrip("/")
            made = home / f"engram-soak-{os.getpid()}"
            try:
                made.mkdir()
                (made / limit).write_text(str(self.LIMIT))
                (made / "cgroup.procs").write_text(str(os.getpid()))
            except OSError:
                with contextlib.suppress(OSError):
                    made.rmdir()
                continue
            self.home, self.made = home, made
            break

    def leave(self) -> None:
        if self.home is not None and self.made is not None:
            with contextlib.suppress(OSError):
                (self.home / "cgroup.procs").write_text(str(os.getpid()))
                self.made.rmdir()


class Soak:
    def __init__(self, seed: int, scratch: Path, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.pressed = 0
        self.scratch = scratch
        self.lock = threading.Lock()
        make = synth.write
        sound = make(scratch / "sound", "qwen", dtype="fp8", rows=400_000, seed=seed)
        planes = make(scratch / "planes", "deepseek", dtype="fp8", rows=60_000, seed=seed + 1)
        cut = make(scratch / "cut", "qwen", dtype="fp8", rows=60_000, seed=seed + 2)
        self.pristine = scratch / "pristine"
        shutil.copytree(cut.directory, self.pristine)
        self.cut = Subject(cut, cut.directory, faulty=True)
        self.subjects = [
            Subject(sound, sound.directory),
            Subject(planes, planes.directory),
            self.cut,
        ]
        self.disk: FaultyFilesystem | None = None
        if why_not() is None:
            disk = make(scratch / "disk", "qwen", dtype="fp8", rows=20_000, seed=seed + 3)
            try:
                self.disk = FaultyFilesystem(disk.directory, scratch / "mounted")
            except OSError as error:
                print(f"no failing disk: {error}")
            else:
                self.subjects.append(Subject(disk, self.disk.path, faulty=True))
        for subject in self.subjects:
            for io in sorted(set(IO_MODES)):
                subject.gathers.append(engram.FileGather(subject.directory, 0, io=io))
            for io in CACHED:
                gather = engram.FileGather(subject.directory, 0, io=io, cache_bytes=BUDGETS[-1])
                subject.gathers.append(gather)

    def count(self, what: str) -> None:
        with self.lock:
            self.counts[what] += 1

    def fail(self, what: str) -> None:
        with self.lock:
            self.failures.append(what)

    def run(self, name: str, step, dice: random.Random) -> None:
        while time.monotonic() < self.until and not self.failures:
            try:
                step(dice)
            except Exception:
                self.fail(f"{name}:\n{traceback.format_exc()}")

    def gather(self, dice: random.Random) -> None:
        """A batch from a table, compared row by row."""
        subject = dice.choice(self.subjects)
        with subject.lock:
            gather = dice.choice(subject.gathers)
        random_ids = np.random.default_rng(dice.getrandbits(32))
        ids = random_ids.integers(0, gather.num_rows, dice.choice(SIZES))
        if dice.random() < 0.2:
            ids[random_ids.integers(0, len(ids), 1 + len(ids) // 8)] = -1
        timeout = dice.choice((None, None, 5.0, 0.01))
        if subject.faulty and self.disk and str(self.disk.path) in gather.files[0]:
            timeout = timeout or 2.0  # A read may be held back.
        try:
            rows = gather.gather(ids, pad_id=-1, timeout=timeout)
        except TimeoutError:
            return self.count("timed out")
        except OSError as error:
            if not subject.faulty or error.row is None:
                raise
            return self.count("refused")
        except ValueError as error:
            if "closed" not in str(error):
                raise
            return self.count("closed")
        self.compare(subject, ids, rows)
        return self.count("right")

    def ticket(self, dice: random.Random) -> None:
        """Batches that are submitted, and waited for, given up or cancelled."""
        subject = dice.choice(self.subjects)
        with subject.lock:
            gather = dice.choice(subject.gathers)
        random_ids = np.random.default_rng(dice.getrandbits(32))
        deadline = 3.0 if subject.faulty else dice.choice((None, 5.0))
        waiting = []
        try:
            for _ in range(dice.randrange(1, 6)):
                ids = random_ids.integers(0, gather.num_rows, dice.choice(SIZES))
                waiting.append((ids, gather.submit(ids, deadline=deadline)))
        except ValueError as error:
            if "closed" not in str(error):
                raise
        for ids, ticket in waiting:
            if dice.random() < 0.2:
                ticket.cancel()
                self.count("cancelled")
                continue
            try:
                self.compare(subject, ids, ticket.wait(30))
                self.count("ticket right")
            except TimeoutError:
                self.count("ticket timed out")
            except OSError as error:
                if not subject.faulty or error.row is None:
                    raise
                self.count("ticket refused")

    def compare(self, subject: Subject, ids: np.ndarray, rows) -> None:
        padded = ids == -1
        for name, expected in synth.expected_rows(subject.info, np.maximum(ids, 0), 0).items():
            got = np.asarray(rows if len(subject.info.tables[0].planes) == 1 else rows[name])
            expected[padded] = 0
            wrong = (got.view(np.uint8).reshape(expected.shape) != expected).any(-1)
            if wrong.any():
                self.fail(f"WRONG ROWS of {subject.directory}: {ids[wrong][:10]}")

    def disturb(self, dice: random.Random) -> None:
        """Something else that may happen to a table."""
        subject = dice.choice(self.subjects)
        with subject.lock:
            place = dice.randrange(len(subject.gathers))
            gather = subject.gathers[place]
        what = dice.choice(("drop", "prefetch", "prewarm", "verify", "reopen", "open", "stats"))
        listed = self.scratch / f"hot rows of {subject.directory.name}"
        try:
            budget = gather.stats()["cache"]["budget_bytes"]
            if budget and dice.random() < 0.6:
                what = dice.choice(("resize", "resize", "save", "load"))
            if what == "drop":
                engram.drop_cache(gather.files)
            elif what == "prefetch":
                gather.prefetch(np.arange(0, gather.num_rows, 37))
            elif what == "prewarm":
                gather.prewarm(dice.randrange(1 << 20, 1 << 26))
            elif what == "verify":
                problems = gather.verify(50).problems
                if problems and not subject.faulty:
                    self.fail(f"verify: {problems[0]}")
            elif what == "reopen":
                gather.reopen()
            elif what == "open":
                io = dice.choice(CACHED if budget else IO_MODES)
                new = engram.FileGather(subject.directory, 0, io=io, cache_bytes=budget)
                with subject.lock:
                    old, subject.gathers[place] = subject.gathers[place], new
                old.close()
            elif what == "resize":
                gather.resize(dice.choice(BUDGETS))
            elif what == "save":
                gather.save_hot(listed)
            elif what == "load" and listed.exists():
                gather.load_hot(listed)
            else:
                gather.stats()
        except (OSError, engram.CheckpointError):
            if not subject.faulty:
                raise
        except ValueError as error:
            if "closed" not in str(error):
                raise
        self.count(what)
        time.sleep(dice.random() / 20)

    def damage(self, dice: random.Random) -> None:
        """Cuts a file, and puts the whole checkpoint back a little later."""
        files = sorted(self.cut.directory.glob("*.safetensors"))
        victim = dice.choice(files)
        size = victim.stat().st_size
        os.truncate(victim, dice.randrange(size) if dice.random() < 0.8 else 0)
        self.count("cut")
        time.sleep(dice.random() / 4)
        for file in files:
            # A new file under the old name: what is open keeps what is left of the old one.
            shutil.copy(self.pristine / file.name, file.with_suffix(".new"))
            file.with_suffix(".new").rename(file)
        for gather in list(self.cut.gathers):
            try:
                gather.reopen()
            except ValueError as error:
                if "closed" not in str(error):
                    raise
        time.sleep(dice.random() / 4)

    def break_disk(self, dice: random.Random) -> None:
        """Errors, held-back and short reads on the filesystem of our own."""
        assert self.disk is not None
        name = dice.choice(sorted(path.name for path in self.disk.path.glob("*.safetensors")))
        start = dice.randrange(3 << 20)
        region = [(start, start + dice.choice((1, 4096, 1 << 18)))]
        rules = dice.choice(({"errors": region}, {"stalls": region}, {"gone": True}, {}))
        self.disk.set(name, **rules)
        self.count("disk: " + " ".join(rules or ("well",)))
        time.sleep(dice.random() / 5)
        self.disk.set(name)

    def press(self, dice: random.Random) -> None:
        """Takes memory and gives it back."""
        size = dice.randrange(1 << 20, 1 << 28)
        self.pressed = size
        block = np.ones(size, np.uint8)
        time.sleep(dice.random() / 5)
        del block
        self.pressed = 0
        self.count("pressed")

    def fork(self, dice: random.Random) -> None:
        """A child gathers from everything that was open."""
        subject = self.subjects[0]
        with subject.lock:
            gather = dice.choice(subject.gathers)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                ids = np.arange(0, 3000, 7)
                self.failures.clear()
                self.compare(subject, ids, gather.gather(ids))
                if gather.stats()["cache"]["budget_bytes"]:
                    gather.resize(BUDGETS[1])
                    for _ in range(2):
                        self.compare(subject, ids, gather.gather(ids))
                    if not gather.stats()["cache"]["rows"]:
                        self.fail("a forked child's cache takes no rows")
                code = 2 if self.failures else 0
            except ValueError:
                code = 0  # Closed by its parent a moment ago.
            finally:
                os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code != 0:
            self.fail(f"a forked child ended with {code}")
        self.count("forked")
        time.sleep(0.2)

    def caches(self) -> tuple[int, int]:
        """MiB that caches of rows may take, and that they do, if each row has touched a page."""
        allowed = taken = 0
        for subject in self.subjects:
            for gather in list(subject.gathers):
                try:
                    cache = gather.stats()["cache"]
                except ValueError:
                    continue  # Closed a moment ago.
                allowed += cache["budget_bytes"]
                whole = cache["index_bytes"] + cache["capacity"] * gather.row_bytes
                taken += min(whole, cache["rows"] * mmap.PAGESIZE)
        return allowed >> 20, taken >> 20

    def close(self) -> None:
        for subject in self.subjects:
            for gather in subject.gathers:
                gather.close()
        if self.disk is not None:
            self.disk.close()


def state(soak: Soak) -> dict[str, int]:
    """Of the process; its memory without what caches hold, and without all that they may hold."""
    pressed = soak.pressed
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous = (int(status["RssAnon"].split()[0]) >> 10) - (max(pressed, soak.pressed) >> 20)
    allowed, taken = soak.caches()
    return {
        "memory": anonymous - taken,
        "beside": anonymous - allowed,
        "descriptors": sum(1 for _ in Path("/proc/self/fd").iterdir()),
        "threads": int(status["Threads"]),
    }


BESIDE = 400
"""MiB that the process may have beside the budgets of its caches: some for each call and thread."""

ALLOWED = {"memory": 48, "descriptors": 24, "threads": 96}
"""Growth from the second quarter to the last: MiB, and what is in use at one moment or another.

One call may have 32 threads read for it, so how many there are depends on which calls overlap.
"""


def grown(samples: list[dict[str, int]]) -> list[str]:
    quarter = len(samples) // 4
    found = []
    for name, allowed in ALLOWED.items():
        early = statistics.median(each[name] for each in samples[quarter : 2 * quarter])
        late = statistics.median(each[name] for each in samples[-quarter:])
        if late - early > allowed:
            found.append(f"{name} grew from {early} to {late}")
    most = max(each["beside"] for each in samples)
    if most > BESIDE:
        found.append(f"{most} MiB beside the budgets of all caches")
    return found


def watch(threads: list[threading.Thread], soak: Soak, seconds: float) -> list[dict[str, int]]:
    """Runs the threads; how the process was while they ran."""
    samples, next_word = [], 0.0
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        samples.append(state(soak))
        if time.monotonic() > next_word:
            next_word = time.monotonic() + 30
            print(f"{samples[-1]} {dict(soak.counts)}", flush=True)
        time.sleep(min(1, seconds / 40))
    return samples


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().getrandbits(31))
    parser.add_argument("--directory", type=Path)
    arguments = parser.parse_args()
    seed = arguments.seed
    print(f"seed {seed}, {arguments.seconds:.0f} seconds", flush=True)
    group = SmallGroup()
    print(
        f"{len(os.sched_getaffinity(0))} processors, "
        + (f"{group.LIMIT >> 20} MiB in all" if group.made else "no control group of its own")
    )
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        soak = Soak(seed, Path(scratch), arguments.seconds)
        jobs = [("gather", soak.gather)] * 16 + [("disturb", soak.disturb)] * 2
        jobs += [("ticket", soak.ticket)] * 2
        jobs += [("damage", soak.damage), ("press", soak.press), ("fork", soak.fork)]
        if soak.disk is not None:
            jobs.append(("disk", soak.break_disk))
        threads = [
            threading.Thread(target=soak.run, args=(name, job, random.Random(f"{seed}.{place}")))
            for place, (name, job) in enumerate(jobs)
        ]
        try:
            samples = watch(threads, soak, arguments.seconds)
        finally:
            soak.until = 0
            for thread in threads:
                thread.join()
            soak.close()
            group.leave()
    failures = soak.failures + (grown(samples) if arguments.seconds >= 60 else [])
    print(f"{samples[-1]} {dict(soak.counts)}")
    for failure in failures:
        print(failure)
    print(f"seed {seed}: {'FAILED' if failures else 'no wrong row, nothing grew'}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
