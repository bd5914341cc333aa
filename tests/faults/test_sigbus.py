"""Files cut short under their mappings: an error of the batch, never of the process."""

from __future__ import annotations

import signal

import pytest
from children import child

CROWD = """
directory, io, how = sys.argv[1:]
import faulthandler
if how == "before":
    faulthandler.enable()
info = synth.load(directory)
gather = engram.FileGather(directory, 0, io=io)
gather.prewarm()
if how == "after":
    faulthandler.enable()
file = gather.files[0]
pieces = [piece for piece in gather.planes[0].pieces if piece.file == file]
first = min(pieces, key=lambda piece: piece.offset)
size = os.path.getsize(file)
counts = {"right": 0, "wrong": 0, "refused": 0, "other": 0}
lock, stop = threading.Lock(), threading.Event()

def work(seed):
    random = np.random.default_rng(seed)
    while not stop.is_set():
        ids = random.integers(0, gather.num_rows, int(random.choice([1, 16, 300, 5000])))
        try:
            outcome = "right" if right(info, ids, gather.gather(ids)) else "wrong"
        except OSError as error:
            named = error.filename == file == error.path and error.row is not None
            outcome = "refused" if error.errno == 5 and named and error.offset else "other"
        with lock:
            counts[outcome] += 1

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
for thread in threads:
    thread.start()
time.sleep(0.2)
for step in range(20, 3, -1):
    os.truncate(file, first.offset + (size - first.offset) * step // 20 - 7)
    time.sleep(0.02)
time.sleep(0.1)
stop.set()
for thread in threads:
    thread.join()
left = np.arange(first.first_row, first.first_row + 50)
report(**counts, good=right(info, left, gather.gather(left)))
"""


@pytest.mark.parametrize(
    ("io", "how"), [("auto", "alone"), ("auto", "before"), ("auto", "after"), ("mmap", "alone")]
)
def test_a_file_cut_under_eight_threads(fresh, io, how):
    seen = child(CROWD, fresh.directory, io, how)
    assert seen["wrong"] == seen["other"] == 0
    assert seen["right"] > 0 < seen["refused"]
    assert seen["good"], "the next good batch is served"
    assert "Bus error" not in seen["stderr"]


FOREIGN = """
directory, how, cause = sys.argv[1:]
import faulthandler, mmap, signal
if how == "before":
    faulthandler.enable()
if how == "ignored":
    signal.signal(signal.SIGBUS, signal.SIG_IGN)
gather = engram.FileGather(directory, 0)
gather.prewarm()
gather.gather(np.arange(100))
if how == "after":
    faulthandler.enable()
    time.sleep(0.001)
    gather.gather(np.arange(100))
heard = []
if how == "python":
    signal.signal(signal.SIGBUS, lambda *_: heard.append(1))
    time.sleep(0.001)
    gather.gather(np.arange(100))
if cause == "sent":
    os.kill(os.getpid(), signal.SIGBUS)
else:
    with open(os.path.join(directory, "other"), "w+b") as file:
        file.truncate(8192)
        view = mmap.mmap(file.fileno(), 8192)
        file.truncate(0)
        view[5000]
time.sleep(0.01)
report(heard=len(heard), rows=len(gather.gather(np.arange(100))))
"""


@pytest.mark.parametrize("cause", ["fault", "sent"])
@pytest.mark.parametrize("how", ["alone", "before", "after"])
def test_a_bus_error_that_is_not_ours_ends_the_process_as_before(fresh, how, cause):
    seen = child(FOREIGN, fresh.directory, how, cause, code=-signal.SIGBUS)
    # faulthandler, where it is on, still says where.
    assert ("Fatal Python error: Bus error" in seen["stderr"]) == (how != "alone")


def test_a_fault_that_is_not_ours_is_not_ignored(fresh):
    child(FOREIGN, fresh.directory, "ignored", "fault", code=-signal.SIGBUS)


def test_a_bus_error_sent_to_a_process_that_ignores_it(fresh):
    assert child(FOREIGN, fresh.directory, "ignored", "sent")["rows"] == 100


def test_a_handler_of_python_hears_a_bus_error_sent(fresh):
    assert child(FOREIGN, fresh.directory, "python", "sent")["heard"] == 1


def test_without_leave_to_handle_it_nothing_is_mapped(fresh):
    script = """
    directory = sys.argv[1]
    info = synth.load(directory)
    gather = engram.FileGather(directory, 0)
    ids = np.arange(0, gather.num_rows, 7)
    served = [right(info, ids, gather.gather(ids)) for _ in range(2)]
    status = open("/proc/self/status").read()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    try:
        engram.FileGather(directory, 0, io="mmap")
        refused = None
    except ValueError as error:
        refused = str(error)
    mapped = len(mappings(gather.files[0]))
    os.truncate(gather.files[0], 5000)
    try:
        gather.gather(np.arange(gather.num_rows))
        cut = None
    except OSError as error:
        cut = error.errno
    report(served=served, bus=caught >> 6 & 1, refused=refused, mapped=mapped, cut=cut,
           io=gather.stats()["io"])
    """
    seen = child(script, fresh.directory, env={"ENGRAM_SIGBUS": "0"})
    assert seen["served"] == [True, True]
    assert (seen["bus"], seen["mapped"], seen["cut"]) == (0, 0, 5)
    assert "ENGRAM_SIGBUS=0" in seen["refused"]
    assert "ENGRAM_SIGBUS=0" in seen["io"]["fallbacks"][0]
    assert not seen["io"]["runs"].startswith("mmap")


def test_handlers_that_keep_coming_turn_the_mapping_off_rather_than_the_process(fresh):
    script = """
    import ctypes
    directory = sys.argv[1]
    info = synth.load(directory)
    gather = engram.FileGather(directory, 0)
    gather.prewarm()
    ids = np.arange(0, gather.num_rows, 7)
    kept = [ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda signal: None) for _ in range(40)]
    served = []
    for handler in kept:
        LIBC.signal(7, handler)
        time.sleep(0.001)
        served.append(right(info, ids, gather.gather(ids)))
    os.truncate(gather.files[0], 5000)
    try:
        gather.gather(np.arange(gather.num_rows))
        cut = None
    except OSError as error:
        cut = error.errno
    report(served=all(served), cut=cut, fallbacks=gather.stats()["io"]["fallbacks"])
    """
    seen = child(script, fresh.directory)
    assert seen["served"]
    assert seen["cut"] == 5
    assert any("handlers of SIGBUS" in text for text in seen["fallbacks"])
