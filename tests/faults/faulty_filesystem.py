"""A filesystem of the tests' own that fails as told: it speaks the kernel's FUSE protocol directly.

The server is a process of its own, so that a read it holds back stalls nobody but the reader. It
serves the files of one directory, flat and read-only; what happens to reads of a file is set while
it runs:

    with FaultyFilesystem(source, mountpoint) as disk:
        disk.set("model.safetensors", errors=[(4096, 8192)])
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
MNT_DETACH = 2

LOOKUP, FORGET, GETATTR, OPEN, READ, STATFS, RELEASE, FSYNC = 1, 2, 3, 14, 15, 17, 18, 20
FLUSH, INIT, OPENDIR, READDIR, RELEASEDIR, INTERRUPT = 25, 26, 27, 28, 29, 36
DESTROY, BATCH_FORGET = 38, 42
SILENT = {FORGET, BATCH_FORGET, INTERRUPT}

ASYNC_READ, ASYNC_DIO = 1 << 0, 1 << 15
FOPEN_DIRECT_IO, FOPEN_KEEP_CACHE = 1, 2


class FaultyFilesystem:
    """The mounted filesystem, from the tests' side."""

    def __init__(self, source: Path, mountpoint: Path) -> None:
        self.path = mountpoint
        mountpoint.mkdir(exist_ok=True)
        self._server = subprocess.Popen(
            [sys.executable, __file__, str(source), str(mountpoint)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        answer = json.loads(self._server.stdout.readline() or '"the server died"')
        if answer != "ready":
            self._server.wait()
            raise OSError(answer)

    def _ask(self, **message: Any) -> Any:
        self._server.stdin.write(json.dumps(message) + "\n")
        self._server.stdin.flush()
        return json.loads(self._server.stdout.readline())

    def set(self, name: str, **rules: Any) -> None:
        """Replaces what happens to a file.

        Rules, each of them a keyword:

        - `errors=[(start, end), ...]` fail with `errno` (EIO);
        - `stalls=[(start, end), ...]` are held back until the next `set` of the file;
        - `flips=[(start, end), ...]` come with their bits flipped, with `only_direct` if read
          around the page cache;
        - `most` bytes come at a time;
        - `direct_io` turns the page cache off for later opens, and mappings with it;
        - `refuse_direct` fails direct reads with EINVAL;
        - `size` is what the file is said to have;
        - `gone` files cannot be looked up or read any more.
        """
        self._ask(file=name, rules=rules)

    def log(self) -> list[tuple[str, int, int, bool]]:
        """Reads since the last call: file, offset, length, and whether direct."""
        return [tuple(entry) for entry in self._ask(log=True)]

    def close(self) -> None:
        LIBC.umount2(os.fsencode(self.path), MNT_DETACH)
        # Without a server the kernel fails whatever is still waiting.
        self._server.kill()
        self._server.wait()
        self._server.stdin.close()
        self._server.stdout.close()

    def __enter__(self) -> FaultyFilesystem:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def why_not() -> str | None:
    """Why there can be no such filesystem here, or None if there can."""
    if not Path("/dev/fuse").exists():
        return "/dev/fuse is missing"
    if os.geteuid() != 0:
        return "mounting needs root"
    return None


class Server:
    def __init__(self, source: Path, mountpoint: Path) -> None:
        self.files = {path.name: path.read_bytes() for path in sorted(source.iterdir())}
        self.names = list(self.files)
        self.rules: dict[str, dict[str, Any]] = {name: {} for name in self.files}
        self.changed = threading.Condition()
        self.reads: list[tuple[str, int, int, bool]] = []
        self.device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.device},rootmode=40000,user_id=0,group_id=0,max_read=131072"
        self.where = os.fsencode(mountpoint)
        if LIBC.mount(b"faulty", self.where, b"fuse", 0, options.encode()) != 0:
            raise OSError(ctypes.get_errno(), "mount")

    def control(self) -> None:
        for line in sys.stdin:
            message = json.loads(line)
            answer: Any = None
            with self.changed:
                if "file" in message:
                    self.rules[message["file"]] = message["rules"]
                    self.changed.notify_all()
                else:
                    answer, self.reads = self.reads, []
            print(json.dumps(answer), flush=True)
        # The tests have gone, with or without a word.
        LIBC.umount2(self.where, MNT_DETACH)
        os._exit(0)

    def serve(self) -> None:
        while True:
            try:
                request = os.read(self.device, 1 << 18)
            except OSError as error:
                if error.errno in (errno.EINTR, errno.ENOENT):
                    continue
                return  # Unmounted.
            opcode, unique, node = struct.unpack_from("<IQQ", request, 4)
            if opcode in SILENT:
                continue
            # A thread each: a read that is held back must not hold up the others.
            work = (opcode, unique, node, request[40:])
            if opcode == READ:
                threading.Thread(target=self.answer, args=work, daemon=True).start()
            else:
                self.answer(*work)

    def answer(self, opcode: int, unique: int, node: int, body: bytes) -> None:
        try:
            code, reply = 0, self.reply(opcode, node, body)
        except OSError as error:
            code, reply = -(error.errno or errno.EIO), b""
        with contextlib.suppress(OSError):  # The reader has gone.
            os.write(self.device, struct.pack("<IiQ", 16 + len(reply), code, unique) + reply)

    def reply(self, opcode: int, node: int, body: bytes) -> bytes:
        if opcode == INIT:
            flags = ASYNC_READ | ASYNC_DIO
            head = struct.pack("<IIIIHHIIHHI", 7, 31, 131072, flags, 64, 48, 131072, 1, 32, 0, 0)
            return head + bytes(28)
        if opcode == LOOKUP:
            name = body.split(b"\0")[0].decode()
            if name not in self.files or self.rules[name].get("gone"):
                raise OSError(errno.ENOENT, name)
            node = self.names.index(name) + 2
            return struct.pack("<QQQQII", node, 0, 0, 0, 0, 0) + self.attributes(node)
        if opcode == GETATTR:
            return struct.pack("<QII", 0, 0, 0) + self.attributes(node)
        if opcode == OPEN:
            direct = self.rules[self.names[node - 2]].get("direct_io")
            return struct.pack("<QIi", 0, FOPEN_DIRECT_IO if direct else FOPEN_KEEP_CACHE, 0)
        if opcode == READ:
            return self.read(self.names[node - 2], body)
        if opcode == OPENDIR:
            return struct.pack("<QIi", 0, 0, 0)
        if opcode == READDIR:
            return self.entries(*struct.unpack_from("<QI", body, 8))
        if opcode == STATFS:
            return struct.pack("<QQQQQIIII", 1 << 20, 0, 0, 100, 0, 4096, 255, 4096, 0) + bytes(24)
        if opcode in (RELEASE, RELEASEDIR, FLUSH, FSYNC, DESTROY):
            return b""
        raise OSError(errno.ENOSYS, str(opcode))

    def attributes(self, node: int) -> bytes:
        if node == 1:
            size, mode, links = 4096, stat.S_IFDIR | 0o755, 2
        else:
            name = self.names[node - 2]
            size = self.rules[name].get("size", len(self.files[name]))
            mode, links = stat.S_IFREG | 0o444, 1
        times = (1_700_000_000,) * 3
        blocks = (size + 511) // 512
        head = struct.pack("<6Q", node, size, blocks, *times)
        return head + struct.pack("<10I", 0, 0, 0, mode, links, 0, 0, 0, 4096, 0)

    def entries(self, offset: int, room: int) -> bytes:
        listing = b""
        for place, name in enumerate(self.names[offset:], offset + 1):
            raw = name.encode()
            entry = struct.pack("<QQII", place + 1, place, len(raw), stat.S_IFREG >> 12) + raw
            entry += bytes(-len(entry) % 8)
            if len(listing) + len(entry) > room:
                break
            listing += entry
        return listing

    def read(self, name: str, body: bytes) -> bytes:
        offset, length = struct.unpack_from("<QI", body, 8)
        direct = bool(struct.unpack_from("<I", body, 32)[0] & os.O_DIRECT)
        end = offset + length

        def touches(which: str) -> bool:
            return any(start < end and offset < stop for start, stop in rules.get(which, ()))

        with self.changed:
            self.reads.append((name, offset, length, direct))
            rules = self.rules[name]
            while touches("stalls"):
                self.changed.wait()
                rules = self.rules[name]
        if rules.get("gone"):
            raise OSError(errno.ESTALE, name)
        if touches("errors"):
            raise OSError(rules.get("errno", errno.EIO), name)
        if direct and rules.get("refuse_direct"):
            raise OSError(errno.EINVAL, name)
        size = rules.get("size", len(self.files[name]))
        data = bytearray(self.files[name][offset : min(end, size)])
        if direct or not rules.get("only_direct"):
            for start, stop in rules.get("flips", ()):
                for place in range(max(start, offset), min(stop, offset + len(data))):
                    data[place - offset] ^= 0xFF
        return bytes(data[: rules.get("most", length)])


def main() -> None:
    try:
        server = Server(Path(sys.argv[1]), Path(sys.argv[2]))
    except OSError as error:
        print(json.dumps(str(error)), flush=True)
        return
    print(json.dumps("ready"), flush=True)
    threading.Thread(target=server.control, daemon=True).start()
    server.serve()


if __name__ == "__main__":
    main()
