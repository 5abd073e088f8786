"""Garbage collection of a node's local tier: one pass, safe beside ranks that load from it.

A rank reads an artifact's files by their names, some of them a moment after it has verified them. So what was read lately
stays: that is known from the access times of its files, which Linux keeps to within a day (``relatime``), and which cost no
write. Any of them counts: a compiler without kcoord reads its own files in its own cache, and no manifest. After the rename into
the trash they are looked at once more; what somebody opened meanwhile is put back.

Not guaranteed: on a file system without access times (``noatime``) nothing is removed at all, which is told. What `kcoord
ls` and others read counts as used. A rank that opens an artifact for the first time in a day in the very microseconds
between the rename and the second look may miss a file.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from kcoord.artifacts.catalog import tiers
from kcoord.artifacts.manifest import MANIFEST_NAME
from kcoord.errors import StoreError
from kcoord.files.faults import (
    store_error,
)
from kcoord.files.naming import (
    staging_name,
)
from kcoord.files.sweep import touched
from kcoord.files.trash import Trash
from kcoord.retention.limits import Entry, Limits, choose
from kcoord.retention.store_collector import (
    BLOCK,
    Collected,
    Tidying,
    tidy_quarantine,
)

LEAST_UNUSED = 26 * 3600.0  # seconds: an access time may lag by a day


def collect_local(
    local_dir: Path,
    limits: Limits,
    *,
    pinned: Collection[str] = (),
    tidying: Tidying | None = None,
    dry_run: bool = False,
    most: int | None = None,
    least_unused: float = LEAST_UNUSED,
) -> Collected:
    """One pass, which removes at most `most` artifacts; `pinned` are places below `local_dir`. `dry_run`: only look, and write
    nothing.

    Raises `StoreError`, also where nobody can tell what is in use. What has no manifest of kcoord's is left alone.
    """
    tidying = tidying or Tidying()
    found = Collected()
    try:
        there = tiers(local_dir)
        if not dry_run:
            for tier in there:
                _tidy(tier, tidying, found)
        if not there or not (limits.any or dry_run):
            return found
        entries = [entry for tier in there for entry in _entries(tier)]
        found.artifacts, found.size = len(entries), sum(e.size for e in entries)
        found.inodes = sum(e.inodes for e in entries)
        if limits.any:
            _check_access_times(there, dry_run)
        now = time.time() if dry_run else max(touched(tier) for tier in there)
        used_lately = {e.name for e in entries if now - e.used < least_unused}
        kept = {str(local_dir / place) for place in pinned}
        found.pinned = sum(e.name in kept for e in entries)
        plan = choose(entries, limits, now, kept | used_lately)
        found.over = plan.over
        for doomed in plan.doomed[:most]:
            if dry_run or _take(Path(doomed.entry.name), doomed.entry.used):
                found.removed.append(doomed)
    except OSError as error:
        raise store_error(error, local_dir) from error
    return found


def _entries(tier: Path) -> Iterator[Entry]:
    with os.scandir(tier) as homes:
        for home in homes:
            with suppress(FileNotFoundError, NotADirectoryError):  # no artifact of ours; or it goes in this very moment
                if home.is_dir(follow_symlinks=False) and not home.name.startswith("."):
                    made = Path(home.path, MANIFEST_NAME).lstat().st_mtime
                    there = _below(home.path)
                    size = sum(-(-found.st_size // BLOCK) * BLOCK for found in there)
                    yield Entry(home.path, size + BLOCK, len(there) + 1, made, _used(there))


def _below(home: str | Path) -> list[os.stat_result]:
    """Of all files and directories. Raises FileNotFoundError if one goes meanwhile."""
    return [os.lstat(f"{parent}/{name}") for parent, folders, names in os.walk(home) for name in folders + names]


def _used(there: list[os.stat_result]) -> float:
    """When one of the files was last read, as far as is known."""
    return max((max(f.st_atime, f.st_mtime) for f in there if stat.S_ISREG(f.st_mode)), default=0.0)


def _take(home: Path, used: float) -> bool:
    trash = Trash(home.parent / ".kcoord" / "trash")
    with suppress(FileNotFoundError):
        if _used(_below(home)) != used:
            return False
        (home.parent / ".kcoord").mkdir(exist_ok=True)
        there = trash.take(home)
        if there is None:
            return False
        return _used(_below(there)) == used or not trash.put_back(there, home)
    return False


def _check_access_times(there: list[Path], dry_run: bool) -> None:
    devices = {tier.stat().st_dev: tier for tier in there}
    for tier in devices.values():
        noatime = os.statvfs(tier).f_flag & os.ST_NOATIME
        if noatime or not (dry_run or keeps_access_times(tier)):
            raise StoreError(
                f"{tier}: its file system keeps no access times (noatime), so nobody knows what is in use: "
                "mount it with relatime, or remove the whole directory while no job runs"
            )


def keeps_access_times(tier: Path) -> bool:
    """Tried, since a mount's options do not tell all. Raises OSError."""
    staging = tier / ".kcoord" / "staging"
    staging.mkdir(parents=True, exist_ok=True)
    probe = staging / f"{staging_name()}.probe"
    try:
        probe.write_bytes(b"read me")
        os.utime(probe, (0, probe.stat().st_mtime))
        probe.read_bytes()
        return probe.stat().st_atime > 0
    finally:
        probe.unlink(missing_ok=True)


def _tidy(tier: Path, tidying: Tidying, found: Collected) -> None:
    ours = tier / ".kcoord"
    try:
        if not stat.S_ISDIR(ours.lstat().st_mode):
            return
        now = touched(ours)
    except FileNotFoundError:
        return
    trash = Trash(ours / "trash")
    found.count("deleted for good", trash.empty(tidying.grace))
    found.count("quarantined", tidy_quarantine(ours / "quarantine", trash, tidying, now))
