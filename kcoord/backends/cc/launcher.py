"""``kcoord cc -- COMPILER ARGUMENTS…``: the command is run as it is, or its output is taken from the job's."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from kcoord.backends.cc.adapter import Compile, CompilerFailed, backend, status_of
from kcoord.backends.cc.command import understood
from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.backends.toolchains import SharedHeaderLists
from kcoord.interruption import let_through
from kcoord.keys.tools import commands


def run(line: Sequence[str]) -> int:
    """The exit status of the compiler. Does not return if `line` is run as it is. Raises OSError if there is no such program."""
    request = _request(line)
    if request is None:
        os.execvp(line[0], list(line))
    try:
        return backend.obtain(request, lambda: status_of(subprocess.run(line).returncode))
    except CompilerFailed as error:
        return error.status
    except OSError as error:  # the output's directory takes no files, which the compiler reports
        let_through(error)
        return status_of(subprocess.run(line).returncode)


@fails_open(lambda line: None)
def _request(line: Sequence[str]) -> Compile | None:
    coordinator = coordinator_in_use()
    command = understood(line) if coordinator is not None else None
    if coordinator is None or command is None:
        return None
    lists = SharedHeaderLists(coordinator)
    here, names = coordinator.settings.local_dir, command.names_places
    try:
        inputs = commands.inputs_of([command.canonical], [command.source], Path.cwd(), here, names, lists)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None  # the compiler reports it itself
    return Compile(command, inputs)
