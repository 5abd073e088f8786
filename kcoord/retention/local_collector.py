"""Garbage collection of a node's local tier: one pass, safe beside ranks that load from it.

A rank reads an artifact's files by their names, some of them a moment after it has verified them. So an artifact that was read
lately stays: the access times of its files tell, which Linux keeps to within a day (``relatime``), and which cost no write. Any
file counts: a compiler without kcoord reads its own files in its own cache, and no manifest. After the rename into the trash
the times are looked at once more; an artifact that somebody opened meanwhile is put back.

Not guaranteed: on a file system without access times (``noatime``) nothing is removed at all, which is told. Reads by `kcoord
ls` and others count as use. A rank that opens an artifact for the first time in a day in the very microseconds between the
rename and the second look may miss a file.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

from kcoord.artifacts.catalog import tiers
from kcoord.artifacts.manifest import MANIFEST_NAME
from kcoord.default_dir import cache_directory
from kcoord.errors import StoreError
from kcoord.files import beneath
from kcoord.files.atomic import staging_name
from kcoord.files.faults import store_errors
from kcoord.files.rename import make_below
from kcoord.files.trash import Trash
from kcoord.retention.limits import BLOCK, Collected, Entry, Limits, blocks, choose
from kcoord.retention.tidying import Tidying, tidy_tier

_CACHES = ("inductor", "inductor-signed", "triton")  # all that launchers name to compilers (`Compiler.child_environ`)
LEAST_UNUSED = 26 * 3600.0  # seconds: an access time may lag by a day


def collect_local(
    local_dir: Path,
    limits: Limits,
    *,
    pinned: Collection[str] = (),
    tidying: Tidying | None = None,
    dry_run: bool = False,
    most: int | None = None,
) -> Collected:
    """One pass, which removes at most `most` artifacts; `pinned` are places below `local_dir`. `dry_run`: only look, and write
    nothing.

    Directories without kcoord's manifest stay, except in the user's cache directory: compilers keep their own caches there, which
    count and go as artifacts do. Raises `StoreError`, also where the use of artifacts cannot be known.
    """
    tidying = tidying or Tidying()
    found = Collected()
    with store_errors(local_dir):
        caches = list(_caches(local_dir)) if is_users_cache(local_dir) else []
        existing = [*tiers(local_dir), *([local_dir] if caches or (local_dir / ".kcoord").is_dir() else [])]
        if not dry_run:
            for tier in existing:
                tidy_tier(tier, tidying, found)
        if not existing or not (limits.any or dry_run):
            return found
        entries = [entry for tier in existing for entry in _entries(tier)]
        entries += caches
        keep = {str(local_dir / place) for place in pinned}
        found.add_found(entries, keep)
        if limits.any:
            _check_access_times(existing, dry_run)
        now = time.time() if dry_run else max(beneath.touched(tier) for tier in existing)
        used_lately = {e.name for e in entries if now - e.used < LEAST_UNUSED}
        plan = choose(entries, limits, now, keep | used_lately)
        found.over = plan.over
        for doomed in plan.doomed[:most]:
            home = Path(doomed.entry.name)
            tier = local_dir if doomed.entry.kind == "cache" else home.parent
            if dry_run or _take(home, tier, doomed.entry.used):
                found.removed.append(doomed)
    return found


def is_users_cache(local_dir: Path) -> bool:
    """True if all of `local_dir` is kcoord's and the compilers': nobody named it."""
    return cache_directory() in (local_dir, local_dir.parent)


def _entries(tier: Path) -> Iterator[Entry]:
    with os.scandir(tier) as homes:
        for home in homes:
            with suppress(FileNotFoundError, NotADirectoryError):  # no artifact of ours; or it goes in this very moment
                if home.is_dir(follow_symlinks=False) and not home.name.startswith("."):
                    yield _entry(home.path, Path(home.path, MANIFEST_NAME).lstat().st_mtime)


def _caches(local_dir: Path) -> Iterator[Entry]:
    """The directories with files in the compilers' caches, each with all below it: a compiler reads its files together.

    The rest of `local_dir` is kcoord's, or somebody's who put it there.
    """
    for place, folders, names in (each for name in _CACHES for each in os.walk(local_dir / name)):
        homes = {name for name in folders if os.path.lexists(f"{place}/{name}/{MANIFEST_NAME}")}
        folders[:] = [name for name in folders if not name.startswith(".") and name not in homes]
        if names and not homes and Path(place).parent != local_dir:
            folders.clear()
            with suppress(FileNotFoundError, PermissionError):  # it goes in this very moment, or is closed to this user
                yield _entry(place, os.lstat(place).st_mtime, "cache")


def _entry(home: str, made: float, kind: Literal["artifact", "cache"] = "artifact") -> Entry:
    files = _below(home)
    size = sum(blocks(status.st_size) for status in files) + BLOCK
    return Entry(home, size, len(files) + 1, made, _used(files), kind)


def _below(home: str | Path) -> list[os.stat_result]:
    """The status of each file and directory below `home`. Raises FileNotFoundError if one goes meanwhile."""
    return [os.lstat(f"{parent}/{name}") for parent, folders, names in os.walk(home) for name in folders + names]


def _used(files: list[os.stat_result]) -> float:
    """The time at which one of the files was last read, as far as is known."""
    return max((max(f.st_atime, f.st_mtime) for f in files if stat.S_ISREG(f.st_mode)), default=0.0)


def _take(home: Path, tier: Path, used: float) -> bool:
    trash = Trash(tier / ".kcoord" / "trash", tier)
    with suppress(FileNotFoundError):
        if _used(_below(home)) != used:
            return False
        trash.directory.parent.mkdir(mode=0o700, exist_ok=True)
        in_trash = trash.take(home)
        if in_trash is None:
            return False
        return _used(_below(in_trash)) == used or not trash.put_back(in_trash, home)
    return False


def _check_access_times(existing: list[Path], dry_run: bool) -> None:
    devices = {tier.stat().st_dev: tier for tier in existing}
    for tier in devices.values():
        noatime = os.statvfs(tier).f_flag & os.ST_NOATIME
        if noatime or not (dry_run or keeps_access_times(tier)):
            raise StoreError(
                f"{tier}: its file system keeps no access times (noatime), so nobody knows what is in use: "
                "mount it with relatime, or remove the whole directory while no job runs"
            )


def keeps_access_times(tier: Path) -> bool:
    """True if reading a file of `tier` moves its access time. Tried, since a mount's options do not tell all. Raises OSError."""
    staging = tier / ".kcoord" / "staging"
    make_below(staging, 0o700)
    probe = staging / f"{staging_name()}.probe"
    try:
        probe.write_bytes(b"read me")
        os.utime(probe, (0, probe.stat().st_mtime))
        probe.read_bytes()
        return probe.stat().st_atime > 0
    finally:
        probe.unlink(missing_ok=True)
