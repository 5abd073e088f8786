"""A lock between processes that is waited for, and never failed for."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType

import pytest
from filelock import FileLock

from kcoord.files.atomic import locked


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


def test_an_exception_of_the_script_s_signal_handler_is_no_time_out_of_ours(tmp_path: Path) -> None:
    def alarmed(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("the script's")

    before = signal.signal(signal.SIGALRM, alarmed)
    try:
        with FileLock(tmp_path / "lock"), pytest.raises(TimeoutError, match="the script's"):  # noqa: PT012
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with locked(tmp_path / "lock", patience=60):
                pass
    finally:
        signal.signal(signal.SIGALRM, before)
