"""The fork servers of a run of tests, whose processes share them: else each imports a compiler once more."""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.support.forkserver import ForkClient, ForkServer, listen, start_server

_VARIABLE = "FORK_SERVERS"  # the directory of a run
_LIFE = "life"  # a FIFO in it: the servers end as soon as nobody has it open for writing


class ForkServers:
    """Made once, by the process that begins the run. Processes with `variables` share their servers, which end with `close`, or
    with this process.
    """

    def __init__(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="kcoord-fork-", dir="/tmp"))  # a socket's path is short
        os.mkfifo(self._directory / _LIFE)
        self._life = os.open(self._directory / _LIFE, os.O_RDWR | os.O_CLOEXEC)
        self.variables = {_VARIABLE: str(self._directory)}

    def close(self) -> None:
        os.close(self._life)
        shutil.rmtree(self._directory, ignore_errors=True)


_servers: dict[tuple[str, ...], ForkClient] = {}
_started: list[subprocess.Popen[bytes]] = []
_one_at_a_time = threading.Lock()


def fork_server(modules: Sequence[str]) -> ForkClient:
    """The run's server of `modules`; without a run this process's, which ends with it.

    It has the variables of the process that asked for it first, but for kcoord's.
    """
    with _one_at_a_time:
        server = _servers.get(tuple(modules))
        if server is None:
            environ = {name: value for name, value in os.environ.items() if not name.startswith("KCOORD_")}
            if directory := os.environ.get(_VARIABLE):
                server = _shared(Path(directory), modules, environ)
            else:
                server = ForkServer(modules, environ)
                atexit.register(server.close)
            _servers[tuple(modules)] = server
        return server


def _shared(directory: Path, modules: Sequence[str], environ: dict[str, str]) -> ForkClient:
    address = directory / hashlib.sha256("\0".join(modules).encode()).hexdigest()[:12]
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not address.exists():
            life = os.open(directory / _LIFE, os.O_RDONLY | os.O_NONBLOCK)
            try:
                with listen(address) as requests:
                    _started.append(start_server(modules, environ, requests, life))
            finally:
                os.close(life)
    return ForkClient(str(address), environ)
