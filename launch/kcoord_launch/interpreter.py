"""The Python that a command runs in: this one, which has kcoord, another one, or one that nobody knows before it runs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

_CHECK = "import importlib.util, sys; sys.exit(importlib.util.find_spec('kcoord') is None)"
_LONGEST = 10.0  # seconds, to start a Python


def interpreter_of(command: Sequence[str]) -> str:
    """The Python that `command` names, or its script's first line does; empty if it is another program."""
    program = shutil.which(command[0]) or ""
    if not Path(program).name.startswith("python"):
        try:
            with Path(program).open("rb") as file:
                first = file.readline(512)
        except OSError:
            return ""
        words = os.fsdecode(first[2:]).split() if first.startswith(b"#!") else []
        if words and Path(words[0]).name == "env":
            words = [shutil.which(words[-1]) or ""]
        program = words[0] if words else ""
    return program if Path(program).name.startswith("python") else ""


def is_this_one(interpreter: str) -> bool:
    """True if it stands in the directory of this Python, so that it has the same packages."""
    return bool(interpreter) and Path(interpreter).parent.resolve() == Path(sys.executable).parent.resolve()


def has_kcoord(interpreter: str) -> bool:
    """False if it says that it has none."""
    try:
        done = subprocess.run(
            [interpreter, "-c", _CHECK], stdin=subprocess.DEVNULL, capture_output=True, timeout=_LONGEST
        )
        return done.returncode != 1
    except (OSError, subprocess.TimeoutExpired):
        return True
