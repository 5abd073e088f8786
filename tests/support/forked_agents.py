"""Agents that tests and their processes start are forked, as these are: 0.3 s of CPU less for each."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from kcoord.rank import spawn
from kcoord.settings import Settings
from tests.support.forkserver import ForkClient, Forked

_ADDRESS = "FORKS_AGENTS"  # the variable of a forked process that has its server's address
_environ = dict(os.environ)  # the server's own: this module is imported as one begins
_start_process = spawn.start_process
_address: Callable[[], str | None] = lambda: None  # noqa: E731
enabled = True


def naming(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a forked process whose agents the server at `address` forks."""
    return {**environ, _ADDRESS: address} if enabled else dict(environ)


def fork_agents(address: Callable[[], str | None] = lambda: os.environ.get(_ADDRESS)) -> None:
    """The server at ``address()`` forks this process's agents from now on. None: they have interpreters of their own."""
    global _address
    spawn.start_process, _address = _forked, address  # type: ignore[assignment]


def _forked(
    listener: socket.socket, arguments: Sequence[str], settings: Settings, output: int | None = None
) -> subprocess.Popen[bytes] | Forked:
    environ, address = spawn.agent_environment(settings), _address() if enabled else None
    environ.pop(_ADDRESS, None)
    client = ForkClient(address, _environ) if address else None
    if client is None or not client.serves(environ):
        return _start_process(listener, [*arguments], settings, output)
    with Path(os.devnull).open("rb") as nothing:
        number = listener.fileno()
        streams = [nothing.fileno(), *(each if output is None else output for each in (1, 2))]
        command = ["-m", "kcoord.agent", "--fd", str(number), *arguments]
        return client.start(command, environ, "/", streams, [number], start_new_session=True)
