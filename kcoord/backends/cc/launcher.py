"""``kcoord cc -- COMPILER ARGUMENTS…``: the command is run as it is, or its outputs are taken from the job's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kcoord.backends.cc.backend import Compile, CompilerBackend, CompilerFailed, status_of
from kcoord.backends.cc.command import Command, understood
from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.keys.environment import TOOLCHAIN_VARIABLES, Environment
from kcoord.keys.tools import commands

_backend = CompilerBackend()


def run(line: Sequence[str]) -> int:
    """The exit status of the compiler. Does not return if `line` is run as it is. Raises OSError if there is no such program."""
    request = _request(line)
    if request is None:
        os.execvp(line[0], list(line))
    try:
        return _backend.obtain(request, lambda: status_of(subprocess.run(line).returncode))
    except CompilerFailed as error:
        return error.status


@fails_open(lambda line: None)
def _request(line: Sequence[str]) -> Compile | None:
    coordinator = coordinator_in_use()
    command = understood(line) if coordinator is not None else None
    if coordinator is None or command is None:
        return None
    environment = Environment(TOOLCHAIN_VARIABLES).token()
    here = coordinator.settings.local_dir
    try:
        inputs = commands.inputs_of(command.canonical, command.sources, Path.cwd(), _places(command), here, environment)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None  # the compiler says it in words of its own
    return Compile(command, inputs)


def _places(command: Command) -> Sequence[str]:
    """The directories of sources, by which ranks differ; none if the output names them. The longest are first."""
    if command.names_places:
        return ()
    found = {str(Path(source).parent) for source in command.sources} | {str(Path.cwd())}
    return sorted(found - {"/", "."}, key=len, reverse=True)
