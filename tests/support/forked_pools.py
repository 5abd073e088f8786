"""Pools that tests and their ranks start are forked, with Triton imported: 1 s of CPU less for each."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from kcoord.rank import pool_start
from kcoord.rank.pool_start import PoolStart
from kcoord.ranks import POOL_SCRIPT
from tests.support.forkserver import ForkClient

VARIABLE = "FORKS_POOLS"  # the server's address; without it a pool has an interpreter of its own
_environ = dict(os.environ)  # the server's own: this module is imported as one begins
_started = PoolStart._started


def fork_pools() -> None:
    """The pools of this process, from now on."""
    PoolStart._started = _forked  # type: ignore[method-assign]


def _forked(
    self: PoolStart, path: Sequence[str], script: str, environ: Mapping[str, str], first: Sequence[str]
) -> socket.socket:
    if VARIABLE not in os.environ:
        return _started(self, path, script, environ, first)
    program = self._program(path, first)
    variables = pool_start._environment(self._settings, environ) | {POOL_SCRIPT: script}
    ours, theirs = socket.socketpair()
    with theirs, Path(os.devnull).open("wb") as nothing:
        streams = (theirs.fileno(), nothing.fileno(), nothing.fileno())
        ForkClient(os.environ[VARIABLE], _environ).start(program, variables, Path.cwd(), streams)
    return ours
