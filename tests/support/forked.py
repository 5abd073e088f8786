"""Agents, pools and ranks that processes of the tests start are forked, too: 0.3 to 6 s of CPU less for each.

A variable for each kind has the address of the server that forks them. Without it they have interpreters of their own.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kcoord.rank import pool_start, spawn
from kcoord.rank.pool_start import PoolStart, Ranks
from kcoord.ranks import POOL_SCRIPT
from kcoord.settings import Settings
from tests.support.forkserver import ForkClient, Forked

AGENTS, POOLS, RANKS = "FORKS_AGENTS", "FORKS_POOLS", "FORKS_RANKS"
_environ = dict(os.environ)  # the server's own: this module is imported as one begins
_start_agent, _start_pool = spawn.start_process, PoolStart._started
_agents: Callable[[], str | None] = lambda: None  # noqa: E731
enabled = True
"""False: agents have interpreters of their own."""


def with_agents(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a forked process whose agents the server at `address` forks."""
    return {**environ, AGENTS: address} if enabled else dict(environ)


def fork_agents(address: Callable[[], str | None] = lambda: os.environ.get(AGENTS)) -> None:
    """The server at ``address()`` forks this process's agents from now on."""
    global _agents
    spawn.start_process, _agents = _agent, address  # type: ignore[assignment]


def _agent(
    listener: socket.socket, arguments: Sequence[str], settings: Settings, output: int | None = None
) -> subprocess.Popen[bytes] | Forked:
    environ, address = spawn.agent_environment(settings), _agents() if enabled else None
    environ.pop(AGENTS, None)
    client = ForkClient(address, _environ) if address else None
    if client is None or not client.serves(environ):
        return _start_agent(listener, [*arguments], settings, output)
    with Path(os.devnull).open("rb") as nothing:
        number = listener.fileno()
        streams = [nothing.fileno(), *(each if output is None else output for each in (1, 2))]
        command = ["-m", "kcoord.agent", "--fd", str(number), *arguments]
        return client.start(command, environ, "/", streams, [number], start_new_session=True)


def fork_pools() -> None:
    """The pools of this process, from now on."""
    PoolStart._started = start_pool  # type: ignore[method-assign]


def start_pool(self: PoolStart, ranks: Ranks) -> socket.socket:
    if POOLS not in os.environ:
        return _start_pool(self, ranks)
    program = self._program(ranks.path)
    variables = pool_start._environment(self._settings, ranks.environ) | {POOL_SCRIPT: ranks.script}
    ours, theirs = socket.socketpair()
    with theirs, Path(os.devnull).open("wb") as nothing:
        streams = (theirs.fileno(), nothing.fileno(), nothing.fileno())
        ForkClient(os.environ[POOLS], _environ).start(program, variables, Path.cwd(), streams)
    return ours


def fork_ranks() -> None:
    """The ranks of this process, which is a torchrun."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    popen = SubprocessHandler._popen

    def forked(handler: Any, args: tuple[str, ...], env: Mapping[str, str]) -> subprocess.Popen[bytes] | Forked:
        if RANKS not in env or args[:2] != (sys.executable, "-u"):
            return popen(handler, args, env)
        outputs = ((1, handler._stdout), (2, handler._stderr))
        streams = [0, *(file.fileno() if file else number for number, file in outputs)]
        return ForkClient(env[RANKS], _environ).start(args[2:], env, Path.cwd(), streams, start_new_session=True)

    SubprocessHandler._popen = forked
