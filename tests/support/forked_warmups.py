"""Processes of ``kcoord warmup`` are forked where a test asks for that, with torch imported: 2 s of CPU less for each."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from kcoord.cli import warmup
from tests.support.forkserver import ForkClient

VARIABLE = "FORKS_WARMUPS"  # the server's address; without it they have interpreters of their own
_environ = dict(os.environ)  # the server's own: this module is imported as one begins
_start_process = warmup._start_process


def fork_warmups() -> None:
    """Those of this process, from now on."""
    warmup._start_process = _forked  # type: ignore[assignment]


class _Piped:
    """As `subprocess.Popen` with a pipe."""

    def __init__(self, client: ForkClient, arguments: list[str], environ: dict[str, str]) -> None:
        out, their_out = os.pipe()
        self.stdout = os.fdopen(out, errors="replace")
        with Path(os.devnull).open("rb") as nothing:
            self._forked = client.start(arguments, environ, Path.cwd(), (nothing.fileno(), their_out, 2))
        os.close(their_out)

    def __getattr__(self, name: str) -> object:
        return getattr(self._forked, name)


def _forked(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str] | _Piped:
    if VARIABLE not in environment:
        return _start_process(arguments, environment)
    client = ForkClient(environment[VARIABLE], _environ)
    return _Piped(client, ["-m", "kcoord.replay", *arguments], environment)
