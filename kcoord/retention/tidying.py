"""Removal of the files beside the artifacts that have had their time: trash, quarantine, staging, time lines, lease files."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kcoord.artifacts.catalog import _BUCKET
from kcoord.files.sweep import sweep, touched
from kcoord.files.trash import GRACE, Trash
from kcoord.retention.collected import Collected
from kcoord.retention.uses import merge_uses

_DAY = 86400.0  # seconds
_LEASE_FILES = {".outcome": _DAY, ".lease": 7 * _DAY, ".part": _DAY}
"""Suffix → seconds. Who asks later than an outcome looks into the store, and no lease is renewed so seldom."""


@dataclass(frozen=True)
class Tidying:
    """The seconds for which other files than artifacts stay, and the number of quarantined artifacts that do."""

    quarantine_for: float = 7 * _DAY
    quarantined: int = 1000
    traces_for: float = 30 * _DAY
    grace: float = GRACE


def tidy_store(store: Path, tidying: Tidying, now: float, found: Collected) -> None:
    """`now` is the store's own time. Counts in `found`. Raises OSError, `StoreError`."""
    v1 = store / "v1"
    _empty_trash(v1, tidying, found)
    found.count("stale staging", sweep(v1 / "staging"))
    _tidy_quarantine(v1, tidying, now, found)
    found.count("traces", _tidy_traces(v1 / "traces", tidying.traces_for, now))
    found.count("outcomes of leases", _tidy_leases(v1 / "leases", now))
    found.count("notes of use, merged", merge_uses(store, now))


def tidy_tier(tier: Path, tidying: Tidying, found: Collected) -> None:
    """The same for a directory of the local tier, whose staging agents sweep. Raises OSError."""
    ours = tier / ".kcoord"
    try:
        if not stat.S_ISDIR(ours.lstat().st_mode):
            return
        now = touched(ours)
    except FileNotFoundError:
        return
    _empty_trash(ours, tidying, found)
    _tidy_quarantine(ours, tidying, now, found)


def _empty_trash(root: Path, tidying: Tidying, found: Collected) -> None:
    found.count("deleted for good", Trash(root / "trash").empty(tidying.grace))


def _tidy_quarantine(root: Path, tidying: Tidying, now: float, found: Collected) -> None:
    """Take away what is there for too long, and the oldest of too many."""
    times = sorted(_times(root / "quarantine"), key=lambda t: t[1])
    excess = max(0, len(times) - tidying.quarantined)
    old = [path for number, (path, at) in enumerate(times) if number < excess or now - at > tidying.quarantine_for]
    trash = Trash(root / "trash")
    found.count("quarantined", sum(trash.take(path) is not None for path in old))


def _times(directory: Path) -> list[tuple[Path, float]]:
    """The entries of `directory`, and when each came there; none if there is no such directory. Raises OSError."""
    found = []
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(directory.lstat().st_mode):
            with os.scandir(directory) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        found.append((Path(entry.path), entry.stat(follow_symlinks=False).st_ctime))
    return found


def _tidy_traces(traces: Path, kept_for: float, now: float) -> int:
    """Files unchanged for so long; a job's directory a day after its last file: an agent may be about to use it."""
    removed = 0
    for job, _ in _times(traces):
        removed += _unlink_old(job, ".spans", kept_for, now)
        with suppress(OSError):  # it is not empty
            if now - job.lstat().st_mtime > _DAY:
                job.rmdir()
    return removed


def _tidy_leases(leases: Path, now: float) -> int:
    buckets = [bucket for bucket, _ in _times(leases) if _BUCKET.fullmatch(bucket.name)]
    return sum(_unlink_old(bucket, suffix, age, now) for bucket in buckets for suffix, age in _LEASE_FILES.items())


def _unlink_old(directory: Path, suffix: str, kept_for: float, now: float) -> int:
    """Remove the plain files of `directory` that nobody has written for so long. A link is not followed."""
    removed = 0
    with suppress(FileNotFoundError, NotADirectoryError):  # another pass has removed it since it was listed
        if not stat.S_ISDIR(directory.lstat().st_mode):
            return 0
        with os.scandir(directory) as entries:
            for entry in entries:
                with suppress(OSError):  # another was faster, or it is another user's
                    ours = entry.name.endswith(suffix) and entry.is_file(follow_symlinks=False)
                    if ours and now - entry.stat(follow_symlinks=False).st_mtime > kept_for:
                        Path(entry.path).unlink()
                        removed += 1
    return removed
