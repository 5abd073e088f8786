"""A modelled NFS server: the requests that processes make of it by their calls on files of a store, on a local disk.

Each request takes 0.5 ms, and the server begins 60,000 a second of all its clients together. A thread makes one at a time, so
calls wait as they do on NFS. The requests are those of an NFS v4.1 client without delegations, whose cache holds no file:

==================================== =============================================================================
open a file                          OPEN, and CLOSE later; one that is missing: OPEN
open or list a directory             LOOKUP; READDIR if it is listed by its path
read, write                          READ or WRITE for each MiB, begun or whole; none at a file's end
stat, of a path                      GETATTR (or LOOKUP). Of an open file: none
mkdir, rmdir, unlink, rename, link   one
utime, fsync                         SETATTR, COMMIT
==================================== =============================================================================

Not modelled: the bytes' way over the network, the server's disks, and a client's caches. Those of names and attributes spare
LOOKUPs; ACCESS, which a client asks once for each directory, and GETATTR, by which it keeps them, come on top. Counted on a real
server: benchmarks/results/cluster_nfs-rig.md.
A library between the processes and their C library counts (`tests.support.interpose`); needs a C compiler.
"""

from __future__ import annotations

import asyncio
import ctypes
import heapq
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support import interpose

LATENCY, RATE = 0.0005, 60_000.0  # seconds of a request, and requests that are begun in a second
LEAST = 3  # requests that bring one file to a node: OPEN, READ, CLOSE
_ONE = ("mkdir", "rmdir", "unlink", "rename", "link", "stat", "utime", "fsync")
_TICK = 0.001  # seconds
_FETCH = """
import pathlib, sys
from kcoord.artifacts.store import Store
assert Store(pathlib.Path(sys.argv[1])).fetch(*sys.argv[2:])
"""


class NfsServer:
    """The server of the store at `root`. `directory` is for its files; with `dilation` it is slower by that factor.

    Give `environ` to each process that is a client.
    """

    def __init__(self, directory: Path, root: Path, dilation: float = 1.0) -> None:
        directory.mkdir(exist_ok=True)
        self._interposer = interpose.Interposer(interpose.build(directory), directory)
        self._interposer.serve(LATENCY * dilation, RATE / dilation)
        self._interposer.cost("open", below=root, requests=1, per_file=1)
        for call in ("read", "write"):
            self._interposer.cost(call, below=root, per_mib=1)
        for call in _ONE:
            self._interposer.cost(call, below=root, requests=1)
        self.environ = self._interposer.environ

    @property
    def requests(self) -> int:
        return self._interposer.requests

    def of_fetch(self, store: Path, digest: str, manifest: str) -> int:
        """The requests of `Store.fetch` for an artifact of `store` that was announced. Nobody else may be at the server."""
        before = self.requests
        subprocess.run(
            [sys.executable, "-c", _FETCH, store, digest, manifest], env=os.environ | self.environ, check=True
        )
        return self.requests - before


class Client:
    """Makes requests without files, thousands at a time, in a process that is a client of an `NfsServer`."""

    def __init__(self) -> None:
        request = ctypes.CDLL(None).interpose_request
        request.restype = ctypes.c_int64
        self._begin = request
        self._replies: list[tuple[int, int, int, asyncio.Future[None]]] = []  # moment, a number, requests left
        self._number = 0

    async def make(self, requests: int) -> None:
        """So many requests, one after the other."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._replies:
            asyncio.get_running_loop().call_later(_TICK, self._hear)
        self._push(requests, done)
        await done

    def _push(self, left: int, done: asyncio.Future[None]) -> None:
        self._number += 1
        heapq.heappush(self._replies, (self._begin(), self._number, left - 1, done))

    def _hear(self) -> None:
        now = time.monotonic_ns()
        while self._replies and self._replies[0][0] <= now:
            _, _, left, done = heapq.heappop(self._replies)
            if left > 0:
                self._push(left, done)
            elif not done.done():
                done.set_result(None)
        if self._replies:
            asyncio.get_running_loop().call_later(_TICK, self._hear)
