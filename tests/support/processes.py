"""Python processes of a test: forked from a server that has imported what they need."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support import forked
from tests.support.forkserver import Forked
from tests.support.shared_servers import fork_server

WITH_KCOORD = "tests.support.with_kcoord"


def start(
    arguments: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path | str,
    streams: Sequence[int],
    pass_fds: Sequence[int] = (),
    wrap: Sequence[str] = (),
) -> subprocess.Popen[bytes] | Forked:
    """``python *arguments``, forked if `environ` allows that. `streams`: descriptors of its input, output and errors.

    `wrap`: a command that runs it, which may lead into a namespace; nothing is forked there.
    """
    server = fork_server((WITH_KCOORD,))
    if server.serves(environ) and not wrap:
        return server.start(arguments, with_agents_forked(environ), cwd, streams, pass_fds)
    stdin, stdout, stderr = streams
    return subprocess.Popen(
        [*wrap, sys.executable, *arguments],
        env=environ,
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        pass_fds=pass_fds,
    )


def with_agents_forked(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` for a forked process whose agents are to be forked, too."""
    return forked.with_agents(fork_server((WITH_KCOORD,)).address, environ)
