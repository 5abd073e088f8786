"""Garbage collection of a store: one pass, safe beside jobs that read and publish, and beside other passes.

Nothing is deleted where it lies: an artifact is renamed into the trash (`kcoord.files.trash`), so a reader gets the
whole of it or a miss, and deleted by a later pass. Times are the file system's own, compared with each other alone. A pass
that is killed leaves every artifact either where it was or in the trash.

The 256 directories of ``objects`` stay, also when they are empty: a publisher may be about to rename into one.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from kcoord.artifacts.signing import OFF, Trust
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT
from kcoord.files.faults import store_errors
from kcoord.files.trash import Trash
from kcoord.packs.pack_files import all_packs
from kcoord.retention.limits import Collected, Entry, Limits, blocks, choose
from kcoord.retention.pins import uses_by_packs
from kcoord.retention.tidying import Tidying, tidy_store

_REST_EVERY, _REST = 256, 0.002  # artifacts, seconds: others want the file server, too


def collect(
    store: Path,
    limits: Limits,
    *,
    pinned: Collection[str] = (),
    tidying: Tidying | None = None,
    trust: Trust = OFF,
    dry_run: bool = False,
    most: int | None = None,
) -> Collected:
    """One pass over `store`, which removes at most `most` artifacts. Raises `StoreError`.

    `pinned`: the digests, and directories of packs below ``v2``, that must stay. Packs that `trust` refuses keep no artifacts.
    `dry_run`: only look, and write nothing. Then the time is this host's: a file system tells its own only to those who write.
    Blocks for as long as the file system does, and rests a little now and then. Not guaranteed: that space is free at once: what
    was removed takes space until its grace period is over and the next pass deletes it.
    """
    tidying = tidying or Tidying()
    check_is_store(store)
    with store_errors(store):
        now = time.time() if dry_run else beneath.touched(store / LAYOUT, store)
        found = Collected()
        if not dry_run:
            tidy_store(store, tidying, now, found)
        if limits.any or dry_run:
            _collect(store, limits, pinned, trust, now, found, dry_run, most)
    return found


def count(store: Path) -> Collected:
    """Count what `store` holds, and remove nothing. Raises `StoreError`."""
    check_is_store(store)
    found = Collected()
    with store_errors(store):
        found.add_found(entries_of(store, {}))
    return found


def _collect(
    store: Path,
    limits: Limits,
    pinned: Collection[str],
    trust: Trust,
    now: float,
    found: Collected,
    dry_run: bool,
    most: int | None,
) -> None:
    # before the look at the artifacts: one that is used meanwhile is seen below, or too young
    uses = uses_by_packs(store, trust)
    entries = list(entries_of(store, uses))
    found.add_found(entries, pinned)
    plan = choose(entries, limits, now, {entry.name for entry in entries if _is_kept(entry, pinned)})
    found.over = plan.over
    if dry_run:
        found.removed = plan.doomed[:most]
        return
    trash, objects = Trash(store / LAYOUT / "trash", store), store / LAYOUT / "objects"
    for number, doomed in enumerate(plan.doomed[:most]):
        if _take(objects, doomed.entry, trash):
            found.removed.append(doomed)
            if doomed.entry.kind == "pack":
                with suppress(OSError):  # another pack is there
                    beneath.rmdir(_path(objects, doomed.entry).parent, store)
        elif _is_there(objects, doomed.entry):
            found.refused += 1
        _rest(number)
    left = len(plan.doomed) - len(plan.doomed[:most])
    if left:
        found.over = f"{left:,} more artifacts are left for the next pass"


def _is_kept(entry: Entry, pinned: Collection[str]) -> bool:
    return (entry.name.rpartition("/")[0] if entry.kind == "pack" else entry.name) in pinned


def _take(objects: Path, entry: Entry, trash: Trash) -> bool:
    return _is_there(objects, entry) and trash.take(_path(objects, entry)) is not None


def _is_there(objects: Path, entry: Entry) -> bool:
    try:
        return _path(objects, entry).lstat().st_mtime == entry.made  # else it was used or replaced a moment ago
    except FileNotFoundError:
        return False  # another pass was faster


def _path(objects: Path, entry: Entry) -> Path:
    if entry.kind == "pack":
        return objects.parent / entry.name
    return objects / entry.name[:2] / entry.name


def entries_of(store: Path, uses: Mapping[str, float]) -> Iterator[Entry]:
    """The artifacts and the packs of `store`, one by one. `uses`: the times by which packs keep artifacts, by digest.

    Raises OSError.
    """
    for number, (path, status) in enumerate(Store(store).objects()):
        _rest(number)
        used = max(status.st_mtime, uses.get(path.name, 0.0))
        yield Entry(path.name, blocks(status.st_size), 1, status.st_mtime, used)
    for path, status in all_packs(store):
        name, touched = path.relative_to(store / LAYOUT).as_posix(), status.st_mtime
        yield Entry(name, blocks(status.st_size), 1, touched, touched, kind="pack")


def _rest(number: int) -> None:
    if number % _REST_EVERY == _REST_EVERY - 1:
        time.sleep(_REST)
