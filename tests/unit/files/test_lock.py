"""A lock between processes that is waited for, and never failed for."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock

from kcoord.files.lock import locked


def test_a_block_has_the_lock_to_itself(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, patience=10), pytest.raises(TimeoutError):
        FileLock(path).acquire(timeout=0)
    FileLock(path).acquire(timeout=0)


def test_a_lock_that_cannot_be_had_is_done_without(tmp_path: Path) -> None:
    path, entered = tmp_path / "lock", []
    with FileLock(path), locked(path, patience=0.01):
        entered.append("held by another")
    with locked(path / "below a file", patience=0.01):
        entered.append("no such place")
    assert entered == ["held by another", "no such place"]
