"""Pools whose agent sees idle cores, whatever else this machine does."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from kcoord.protocol import endpoint
from kcoord.rank import spawn
from kcoord.rank.client import AgentClient
from kcoord.rank.pool_start import PoolStart, Ranks
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from tests.support import forked, processes
from tests.support.sandbox import WITH_TRITON, Sandbox
from tests.support.shared_servers import fork_server
from tests.support.triton_ranks import hooked

_SEES_IDLE_CORES = """
import sys
from kcoord.agent import claims, pools
from kcoord.agent.pools import Permits
ask = Permits.ask
Permits.ask = lambda self, owner, most, memory, idle, left: ask(self, owner, most, memory, 8.0, 8.0)
pools._RESTS, claims._STARVED = {rests}, {starved}
from kcoord.agent.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


def start_agent(settings: Settings, rests: float = 30.0, starved: float = 30.0) -> None:
    """One for which this machine's cores idle, whatever else it does.

    Its pools end after `rests` seconds without work. A rank waits for a worker for `starved` seconds.
    """
    path = settings.socket_path
    endpoint.make_directory(settings)
    with endpoint.agent_lock(path, 20), endpoint.bind(path) as listener, Path(os.devnull).open("rb") as nothing:
        fd = listener.fileno()
        program = _SEES_IDLE_CORES.format(rests=rests, starved=starved)
        command = ["-c", program, "kcoord.agent", "--fd", str(fd), "--daemon"]
        starter = processes.start(command, spawn.agent_environment(settings), "/", (nothing.fileno(), 1, 2), [fd])
        assert starter.wait(60) == 0


def started(
    sandbox: Sandbox,
    path: list[str],
    script: str = "",
    **limits: Any,
) -> PoolStart:
    """A pool that this process starts as a launcher does, with those `limits` of `PoolStart`."""
    environment = {k: v for k, v in hooked(sandbox, 0, KCOORD_PROFILE="six").items() if v is not None}
    settings = Settings.from_environ(sandbox.env(**environment))
    client = AgentClient(settings, Notices())
    start = PoolStart(settings, Notices(), client, Ranks([*path, *sys.path], script, os.environ, ()), **limits)
    with pytest.MonkeyPatch.context() as patched:
        for name, value in {**sandbox.environment, **environment}.items():
            patched.setenv(name, value)
        patched.setenv(forked.POOLS, fork_server((WITH_TRITON,)).address)
        patched.setattr(PoolStart, "_started", forked.start_pool)
        patched.delenv("KCOORD_SPAWN", raising=False)
        start.start()
    client.close()
    return start


def status(sandbox: Sandbox) -> dict[str, Any]:
    client = AgentClient(Settings.from_environ(sandbox.env()), Notices())
    found = client.status()
    client.close()
    assert found is not None
    return found


def pool_status(sandbox: Sandbox) -> dict[str, Any]:
    (found,) = status(sandbox)["pools"].values()
    return dict(found)
