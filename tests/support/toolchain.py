"""Fingerprints of compilers, which the local directories of all tests share: else each test hashes half a gigabyte."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_VARIABLE = "TOOLCHAIN_OF_THE_TESTS"


def begin() -> None:
    """Call it once a run, before its workers start."""
    os.environ[_VARIABLE] = tempfile.mkdtemp(prefix="kc-tools-", dir="/tmp")


def end() -> None:
    shutil.rmtree(os.environ.pop(_VARIABLE), ignore_errors=True)


def share(local: Path) -> None:
    """Make `local`, a local directory, with the shared fingerprints in it. Outside a run of tests nothing is shared."""
    shared = os.environ.get(_VARIABLE)
    if shared and not local.exists():
        local.mkdir(mode=0o700)
        (local / "toolchain").symlink_to(shared)
