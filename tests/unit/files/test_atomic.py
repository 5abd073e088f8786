"""Small files: replaced whole or not at all; and a lock between processes that is waited for, and never failed for."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path
from types import FrameType

import pytest
from filelock import FileLock

from kcoord.files import beneath
from kcoord.files.atomic import locked, replace_file


@pytest.fixture
def staging(tmp_path: Path) -> Path:
    made = tmp_path / "staging"
    made.mkdir()
    return made


def test_a_file_is_made_and_replaced(tmp_path: Path, staging: Path) -> None:
    for content in (b"first", b"second"):
        replace_file(tmp_path / "file", content, staging)
        assert (tmp_path / "file").read_bytes() == content
    assert list(staging.iterdir()) == []


def test_without_a_staging_directory_the_new_file_is_hidden_beside_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    rename = beneath.rename

    def noted(source: Path, target: Path, root: Path | None) -> None:
        seen.extend(p.name for p in tmp_path.iterdir())
        rename(source, target, root)

    monkeypatch.setattr(beneath, "rename", noted)
    replace_file(tmp_path / "file", b"content")
    (name,) = seen
    assert name.startswith("."), "whoever lists the directory leaves it out"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_fills_up_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_file(tmp_path / "file", b"old", staging)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="space"):
        replace_file(tmp_path / "file", b"new", staging, durable=True)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert list(staging.iterdir()) == []


def test_no_directory_is_made(tmp_path: Path) -> None:
    """Where a mount has vanished it would be made on the disk below."""
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "file", b"new", tmp_path / "vanished" / "staging")
    with pytest.raises(FileNotFoundError):
        replace_file(tmp_path / "vanished" / "file", b"new")
    assert list(tmp_path.iterdir()) == []


def test_a_durable_file_and_its_name_are_flushed(
    tmp_path: Path, staging: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").readlink()))
    replace_file(tmp_path / "file", b"new", staging, durable=True)
    assert [path.parent for path in synced] == [staging, tmp_path.parent]
    assert synced[1] == tmp_path


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
