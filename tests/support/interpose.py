"""Faults that a process sees in its own system calls, while it runs: a library between it and its C library (LD_PRELOAD).

For what a test cannot have for real without a broken disk, a quota or a second NFS host, for a wall clock that is off, and for
the requests that calls would be to a server, of which all processes with one table are clients.
Needs a C compiler. The layout of the table is interpose.c's.
"""

from __future__ import annotations

import ctypes
import mmap
import shutil
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_name("interpose.c")
_ENTRIES = 32
CALLS = ("open", "rename", "mkdir", "rmdir", "unlink", "link", "stat", "utime", "fsync", "read", "write")


class _Entry(ctypes.Structure):
    _fields_ = (
        ("call", ctypes.c_char * 16),
        ("below", ctypes.c_char * 1000),
        ("error", ctypes.c_int32),
        ("left", ctypes.c_int32),
        ("stall", ctypes.c_int64),
        ("done", ctypes.c_int32),
        ("hits", ctypes.c_uint32),
        ("requests", ctypes.c_int32),
        ("per_file", ctypes.c_int32),
        ("per_mib", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class _Server(ctypes.Structure):
    _fields_ = (
        ("latency", ctypes.c_int64),
        ("interval", ctypes.c_int64),
        ("next", ctypes.c_int64),
        ("requests", ctypes.c_uint64),
    )


class _Table(ctypes.Structure):
    _fields_ = (
        ("clock", ctypes.c_int64),
        ("used", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("server", _Server),
        ("entries", _Entry * _ENTRIES),
    )


def find_compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc")


def build(directory: Path) -> Path:
    """The library, built into `directory`."""
    compiler = find_compiler()
    assert compiler is not None, "no C compiler"
    library = directory / "interpose.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o", library, _SOURCE, "-ldl"], check=True
    )
    return library


class Fault:
    """One fault. `hits`: how many calls have met it."""

    def __init__(self, table: _Table, number: int) -> None:
        self._table, self._number = table, number

    @property
    def hits(self) -> int:
        return int(self._table.entries[self._number].hits)

    def end(self) -> None:
        self._table.used &= ~(1 << self._number)


class Interposer:
    """Give `environ` to every process that is to see the faults; those that run see what is set later, too."""

    def __init__(self, library: Path, directory: Path) -> None:
        path = directory / "interpose.table"
        with path.open("w+b") as file:
            file.truncate(ctypes.sizeof(_Table))
            self._map = mmap.mmap(file.fileno(), ctypes.sizeof(_Table))
        self._table = _Table.from_buffer(self._map)
        self._next = 0
        self.environ = {"LD_PRELOAD": str(library), "INTERPOSE": str(path)}

    def fail(self, call: str, *, below: Path, error: int, times: int | None = None, done: bool = False) -> Fault:
        """`call` on a path at or below `below` fails with `error`, `times` times (None: until `Fault.end`).

        A rename and a link are told by their target. `done`: the call is made all the same, as a resent NFS request.
        """
        return self._add(call, below, error=error, left=-1 if times is None else times, done=int(done))

    def stall(self, call: str, *, below: Path, seconds: float, times: int | None = None) -> Fault:
        """`call` takes `seconds` longer, and cannot be interrupted."""
        return self._add(call, below, stall=int(seconds * 1e6), left=-1 if times is None else times)

    def serve(self, latency: float, rate: float) -> None:
        """A request takes `latency` seconds, and the server begins `rate` of them a second."""
        self._table.server.latency, self._table.server.interval = int(latency * 1e9), int(1e9 / rate)

    def cost(self, call: str, *, below: Path, requests: int = 0, per_file: int = 0, per_mib: int = 0) -> Fault:
        """`call` makes `requests` to the server, one after the other, `per_file` more if it opens a file (or lists a directory),
        and `per_mib` for each MiB, begun or whole, that it moves.
        """
        return self._add(call, below, left=-1, requests=requests, per_file=per_file, per_mib=per_mib)

    @property
    def requests(self) -> int:
        """To the server, by all processes."""
        return int(self._table.server.requests)

    def clock(self, offset: float) -> None:
        """The wall clock is `offset` seconds ahead of this host's, from now on."""
        self._table.clock = int(offset * 1e9)

    def clear(self) -> None:
        """No faults, and the right time."""
        self._table.used = 0
        self._table.clock = 0

    def _add(self, call: str, below: Path, **values: int) -> Fault:
        assert call in CALLS, call
        number = next(n for n in (*range(self._next, _ENTRIES), *range(self._next)) if not self._table.used & (1 << n))
        self._next = (number + 1) % _ENTRIES  # one that has just ended may still be read
        entry = self._table.entries[number]
        ctypes.memset(ctypes.addressof(entry), 0, ctypes.sizeof(entry))
        entry.call, entry.below = call.encode(), str(below).encode()
        for name, value in values.items():
            setattr(entry, name, value)
        self._table.used |= 1 << number
        return Fault(self._table, number)
