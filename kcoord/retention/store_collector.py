"""Garbage collection of a store: one pass, safe beside jobs that read and publish, and beside other passes.

Nothing is deleted where it lies: an artifact is renamed into the trash (`kcoord.files.trash`), so a reader gets the
whole of it or a miss, and deleted by a later pass. Times are the file system's own, compared with each other alone. A pass
that is killed leaves every artifact either where it was or in the trash.

A pass leaves its count for the agents' metrics (`kcoord.retention.holdings`).

The 256 directories of ``objects`` stay, also when they are empty: a publisher may be about to rename into one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
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
from kcoord.retention.holdings import note_holdings
from kcoord.retention.limits import Collected, Doomed, Entry, Limits, blocks, choose
from kcoord.retention.pins import uses_by_packs
from kcoord.retention.tidying import Tidying, tidy_store
from kcoord.telemetry.events import log

_PINS_AGAIN = 200  # removals between two looks at the pins
_REST_EVERY, _REST = 256, 0.002  # artifacts, seconds: others want the file server, too

Pinned = Callable[[], Collection[str]]
"""The digests, and directories of packs below ``v2``, that must stay, looked up anew at each call. Raises `StoreError`: then
nothing is removed.
"""


def collect(
    store: Path,
    limits: Limits,
    *,
    pinned: Pinned = frozenset,
    tidying: Tidying | None = None,
    trust: Trust = OFF,
    dry_run: bool = False,
    most: int | None = None,
) -> Collected:
    """One pass over `store`, which removes at most `most` artifacts. Raises `StoreError`.

    Packs that `trust` refuses keep no artifacts.
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
            if not dry_run:
                _note(store, found)
    return found


def count(store: Path) -> None:
    """Note what `store` holds, and remove nothing. Raises `StoreError`."""
    check_is_store(store)
    found = Collected()
    with store_errors(store):
        found.add_found(entries_of(store, {}))
    _note(store, found)


def _note(store: Path, found: Collected) -> None:
    try:
        note_holdings(store, *found.left)
    except OSError as error:  # a full disk, where removing goes on
        log.info("the holdings of the store are not noted: %s", error)


def _collect(
    store: Path,
    limits: Limits,
    pinned: Pinned,
    trust: Trust,
    now: float,
    found: Collected,
    dry_run: bool,
    most: int | None,
) -> None:
    # before the look at the artifacts: one that is used or pinned meanwhile is seen below, or too young
    keep, uses = pinned(), uses_by_packs(store, trust)
    entries = list(entries_of(store, uses))
    found.add_found(entries, keep)
    plan = choose(entries, limits, now, {entry.name for entry in entries if _is_kept(entry, keep)})
    found.over = plan.over
    if dry_run:
        found.removed = plan.doomed[:most]
        return
    trash, objects = Trash(store / LAYOUT / "trash", store), store / LAYOUT / "objects"
    taken: list[tuple[Doomed, Path]] = []
    for number, doomed in enumerate(plan.doomed[:most]):
        if number % _PINS_AGAIN == 0:
            keep = pinned()
        if not _is_kept(doomed.entry, keep):
            in_trash = _take(objects, doomed.entry, trash)
            if in_trash is not None:
                taken.append((doomed, in_trash))
            elif _is_there(objects, doomed.entry):
                found.refused += 1
        _rest(number)
    # a profile may have been pinned meanwhile, and its user was told that it is kept; its pack, first, tells what that is
    for packs in (True, False) if taken else ():
        keep = pinned()
        for doomed, in_trash in taken:
            if doomed.entry.is_pack != packs:
                continue
            if not _is_kept(doomed.entry, keep) or not trash.put_back(in_trash, _path(objects, doomed.entry)):
                found.removed.append(doomed)
                if packs:
                    with suppress(OSError):  # another pack is there
                        beneath.rmdir(_path(objects, doomed.entry).parent, store)
    left = len(plan.doomed) - len(plan.doomed[:most])
    if left:
        found.over = f"{left:,} more artifacts are left for the next pass"


def _is_kept(entry: Entry, keep: Collection[str]) -> bool:
    return (entry.name.rpartition("/")[0] if entry.is_pack else entry.name) in keep


def _take(objects: Path, entry: Entry, trash: Trash) -> Path | None:
    return trash.take(_path(objects, entry)) if _is_there(objects, entry) else None


def _is_there(objects: Path, entry: Entry) -> bool:
    try:
        return _path(objects, entry).lstat().st_mtime == entry.made  # else it was used or replaced a moment ago
    except FileNotFoundError:
        return False  # another pass was faster


def _path(objects: Path, entry: Entry) -> Path:
    if entry.is_pack:
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
        yield Entry(name, blocks(status.st_size), 1, touched, touched, is_pack=True)


def _rest(number: int) -> None:
    if number % _REST_EVERY == _REST_EVERY - 1:
        time.sleep(_REST)
