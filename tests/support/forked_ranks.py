"""Ranks of a forked torchrun are forked where a test asks for that, with torch imported: 6 s of CPU less for each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

from tests.support.forkserver import ForkClient, Forked

VARIABLE = "FORKS_RANKS"  # the server's address
_environ = dict(os.environ)  # the server's own: this module is imported as one begins
_popen = SubprocessHandler._popen


def _forked(handler: Any, args: tuple[str, ...], env: Mapping[str, str]) -> subprocess.Popen[bytes] | Forked:
    if VARIABLE not in env or args[:2] != (sys.executable, "-u"):
        return _popen(handler, args, env)
    streams = [0, *(file.fileno() if file else number for number, file in ((1, handler._stdout), (2, handler._stderr)))]
    client = ForkClient(env[VARIABLE], _environ)
    return client.start(args[2:], env, Path.cwd(), streams, start_new_session=True)


def fork_ranks() -> None:
    SubprocessHandler._popen = _forked
