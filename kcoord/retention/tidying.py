"""Removal of the files beside the artifacts that have had their time: trash, quarantine, staging, time lines, lease files."""

from __future__ import annotations

import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kcoord.artifacts.catalog import _BUCKET
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT
from kcoord.files.sweep import sweep
from kcoord.files.trash import GRACE, Trash
from kcoord.packs.recipe_files import newest_parts, paths_of_parts, profiles_in
from kcoord.retention.limits import Collected

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
    layout = store / LAYOUT
    _empty_trash(layout, store, tidying, found)
    found.count("stale staging", sweep(layout / "staging", store))
    _tidy_quarantine(layout, store, tidying, now, found)
    found.count("traces", _tidy_traces(layout / "traces", store, tidying.traces_for, now))
    found.count("old parts of profiles", tidy_parts(store))
    found.count("outcomes of leases", _tidy_leases(layout / "leases", store, now))


def tidy_tier(tier: Path, tidying: Tidying, found: Collected) -> None:
    """The same for a directory of the local tier, whose staging agents sweep. Raises OSError."""
    ours = tier / ".kcoord"
    try:
        now = beneath.touched(ours, tier)
    except (FileNotFoundError, NotADirectoryError):
        return
    _empty_trash(ours, tier, tidying, found)
    _tidy_quarantine(ours, tier, tidying, now, found)


def _empty_trash(ours: Path, root: Path, tidying: Tidying, found: Collected) -> None:
    found.count("deleted for good", Trash(ours / "trash", root).empty(tidying.grace))


def _tidy_quarantine(ours: Path, root: Path, tidying: Tidying, now: float, found: Collected) -> None:
    """Move old entries to the trash, and the oldest of those beyond the number that may stay."""
    times = sorted(_times(ours / "quarantine", root), key=lambda t: t[1])
    excess = max(0, len(times) - tidying.quarantined)
    old = [path for number, (path, at) in enumerate(times) if number < excess or now - at > tidying.quarantine_for]
    trash = Trash(ours / "trash", root)
    found.count("quarantined", sum(trash.take(path) is not None for path in old))


def _times(directory: Path, root: Path) -> list[tuple[Path, float]]:
    """The entries of `directory`, and when each came there; none if there is no such directory. Raises OSError."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return [(directory / name, found.st_ctime) for name, found in beneath.listed(directory, root)]
    return []


def _tidy_traces(traces: Path, root: Path, kept_for: float, now: float) -> int:
    """Remove files unchanged for `kept_for` seconds, and jobs' directories that were empty for a day: agents make them first."""
    removed = 0
    for job, _ in _times(traces, root):
        removed += _unlink_old(job, root, ".spans", kept_for, now)
        with suppress(OSError):  # it is not empty
            if now - beneath.lstat(job, root).st_mtime > _DAY:
                beneath.rmdir(job, root)
    return removed


def tidy_parts(store: Path) -> int:
    """Take away the parts of profiles that nobody reads, after a day: the newest ones hold what is used of them.

    Raises OSError, `StoreError`.
    """
    trash, removed, profiles = Trash(store / LAYOUT / "trash", store), 0, store / LAYOUT / "profiles"
    for directory in [profiles / name for name in profiles_in(profiles)]:
        sweep(directory, store)  # left by a killed writer
        for path in set(paths_of_parts(directory)).difference(newest_parts(directory)):
            now = beneath.touched(directory, store)
            with suppress(FileNotFoundError):  # its writer has just replaced it
                removed += now - path.lstat().st_mtime > _DAY and trash.take(path) is not None
    return removed


def _tidy_leases(leases: Path, root: Path, now: float) -> int:
    buckets = [bucket for bucket, _ in _times(leases, root) if _BUCKET.fullmatch(bucket.name)]
    return sum(
        _unlink_old(bucket, root, suffix, age, now) for bucket in buckets for suffix, age in _LEASE_FILES.items()
    )


def _unlink_old(directory: Path, root: Path, suffix: str, kept_for: float, now: float) -> int:
    """Remove the plain files of `directory` unchanged for `kept_for` seconds. Links are not followed."""
    removed = 0
    with suppress(FileNotFoundError, NotADirectoryError):  # another pass has removed it since it was listed
        for name, found in beneath.listed(directory, root):
            if name.endswith(suffix) and stat.S_ISREG(found.st_mode) and now - found.st_mtime > kept_for:
                with suppress(OSError):  # another was faster, or it is another user's
                    beneath.unlink(directory / name, root)
                    removed += 1
    return removed
