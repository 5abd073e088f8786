"""Directories that this process made by `tempfile.mkdtemp` or `tempfile.TemporaryDirectory`: it throws away what lies there.

A tuner (Helion) compiles each of its candidates in such a directory, and uses one of them.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from kcoord.latest import Latest

_MOST = 1000
_made: Latest[str, None] = Latest(_MOST)


def watch_temporary_directories() -> None:
    """Remember the directories that are made from now on. Idempotent."""
    native = tempfile.mkdtemp
    if getattr(native, "__module__", "") == __name__:
        return

    def mkdtemp(*args: Any, **kwargs: Any) -> Any:
        made = native(*args, **kwargs)
        _made[os.path.abspath(os.fsdecode(made))] = None  # noqa: PTH100 - without a look at the disk
        return made

    mkdtemp.__doc__ = native.__doc__
    tempfile.mkdtemp = mkdtemp  # `TemporaryDirectory` looks it up there


def is_temporary(path: Path) -> bool:
    """True if `path` lies below such a directory."""
    return bool(_made) and any(str(parent) in _made for parent in path.parents)
