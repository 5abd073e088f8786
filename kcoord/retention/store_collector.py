"""Garbage collection of a store: one pass, safe beside jobs that read and publish, and beside other passes.

Nothing is deleted where it lies: an artifact is renamed into the trash (`kcoord.files.trash`), so a reader gets the
whole of it or a miss, and deleted by a later pass. Times are the file system's own, compared with each other alone. A pass
that is killed leaves every artifact either where it was or in the trash.

What a pass counted it leaves for the agents' metrics (`kcoord.retention.holdings`).

The 256 directories of ``objects`` stay, also when they are empty: a publisher may be about to rename into one.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kcoord.artifacts.catalog import _BUCKET, homes_of
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files.faults import (
    store_error,
)
from kcoord.files.sweep import sweep, touched
from kcoord.files.trash import GRACE, Trash
from kcoord.retention.holdings import note_holdings
from kcoord.retention.limits import (
    Doomed,
    Entry,
    Limits,
    choose,
)
from kcoord.retention.uses import PREFIX, load_uses, merge_uses
from kcoord.telemetry.events import log

BLOCK = 4096  # bytes: what a file takes at least
_OUTCOME, _MARKER, _ASIDE = ".outcome", ".lease", ".part"
_OUTCOMES_FOR = 86400.0  # seconds; whoever asks later looks into the store
_MARKERS_FOR = 7 * 86400.0  # nobody renews one so seldom
_PINS_AGAIN = 200  # removals between two looks at the pins
_REST_EVERY, _REST = 256, 0.002  # artifacts, seconds: others want the file server, too
_TOOLCHAIN = (
    "torch",
    "compilers",
)  # beside the factor that is named after the key's compiler, and versions of packages
_VERSION = re.compile(r"\d+\.\d+\.\d+\S*")

Pinned = Callable[[], Collection[str]]
"""The digests that must stay, looked up anew at each call. Raises `StoreError`: then nothing is removed."""


@dataclass(frozen=True)
class Tidying:
    """How long, in seconds, what is no artifact stays; and how many quarantined artifacts."""

    quarantine_for: float = 7 * 86400.0
    quarantined: int = 1000
    traces_for: float = 30 * 86400.0
    grace: float = GRACE


@dataclass
class Collected:
    """What there was, and what a pass did: `removed` is in the trash now (or would be, in a dry run).

    `refused`: how many it should have removed, and this user may not rename.
    """

    artifacts: int = 0
    size: int = 0
    inodes: int = 0
    pinned: int = 0
    removed: list[Doomed] = field(default_factory=list)
    refused: int = 0
    over: str = ""
    tidied: dict[str, int] = field(default_factory=dict)

    @property
    def removed_size(self) -> int:
        return sum(d.entry.size for d in self.removed)

    @property
    def left(self) -> tuple[int, int, int]:
        """Artifacts, bytes and inodes that are there after the pass."""
        inodes = self.inodes - sum(d.entry.inodes for d in self.removed)
        return self.artifacts - len(self.removed), self.size - self.removed_size, inodes

    def count(self, what: str, number: int) -> None:
        if number:
            self.tidied[what] = self.tidied.get(what, 0) + number


def collect(
    store: Path,
    limits: Limits,
    *,
    pinned: Pinned = frozenset,
    tidying: Tidying | None = None,
    dry_run: bool = False,
    most: int | None = None,
) -> Collected:
    """One pass over `store`, which removes at most `most` artifacts. Raises `StoreError`.

    `dry_run`: only look, and write nothing. Then the time is this host's: a file system tells its own only to those who write.
    Blocks for as long as the file system does, and rests a little now and then. Not guaranteed: that a limit of size is kept
    by the files that lie there now: what was removed takes space until its grace period is over and the next pass deletes it.
    """
    tidying = tidying or Tidying()
    check_is_store(store)
    try:
        now = time.time() if dry_run else touched(store / "v1")
        found = Collected()
        if not dry_run:
            _tidy(store, tidying, now, found)
        if limits.any or dry_run:
            _collect(store, limits, pinned, now, found, dry_run, most)
            if not dry_run:
                _note(store, found)
    except OSError as error:
        raise store_error(error, store) from error
    return found


def count(store: Path) -> None:
    """Note what `store` holds, and remove nothing. Raises `StoreError`."""
    check_is_store(store)
    found = Collected()
    try:
        for entry in entries_of(store, {}):
            found.artifacts, found.size = found.artifacts + 1, found.size + entry.size
            found.inodes += entry.inodes
    except OSError as error:
        raise store_error(error, store) from error
    _note(store, found)


def _note(store: Path, found: Collected) -> None:
    try:
        note_holdings(store, *found.left)
    except OSError as error:  # a full disk, where removing goes on
        log.info("what the store holds is not noted: %s", error)


def _collect(
    store: Path, limits: Limits, pinned: Pinned, now: float, found: Collected, dry_run: bool, most: int | None
) -> None:
    keep, uses = (
        pinned(),
        load_uses(store),
    )  # before the look: what is used or pinned meanwhile is seen below, or too young
    entries = list(entries_of(store, uses, toolchains=limits.toolchain_gone is not None))
    found.artifacts, found.size = len(entries), sum(e.size for e in entries)
    found.inodes, found.pinned = sum(e.inodes for e in entries), sum(e.name in keep for e in entries)
    plan = choose(entries, limits, now, keep)
    found.over = plan.over
    if dry_run:
        found.removed = plan.doomed[:most]
        return
    trash, objects = Trash(store / "v1" / "trash"), store / "v1" / "objects"
    taken: list[tuple[Doomed, Path]] = []
    for number, doomed in enumerate(plan.doomed[:most]):
        if number % _PINS_AGAIN == 0:
            keep = pinned()
        if doomed.entry.name not in keep:
            there = _take(objects, doomed.entry, trash)
            if there is not None:
                taken.append((doomed, there))
            elif _is_there(objects, doomed.entry):
                found.refused += 1
        _rest(number)
    keep = pinned() if taken else keep  # who has pinned a profile meanwhile was told that it is kept
    for doomed, there in taken:
        if doomed.entry.name not in keep or not trash.put_back(there, _home(objects, doomed.entry)):
            found.removed.append(doomed)
    left = len(plan.doomed) - len(plan.doomed[:most])
    if left:
        found.over = f"{left:,} more artifacts are left for the next pass"


def _take(objects: Path, entry: Entry, trash: Trash) -> Path | None:
    return trash.take(_home(objects, entry)) if _is_there(objects, entry) else None


def _is_there(objects: Path, entry: Entry) -> bool:
    try:
        return _home(objects, entry).lstat().st_mtime == entry.made  # else it was replaced a moment ago
    except FileNotFoundError:
        return False  # another pass was faster


def _home(objects: Path, entry: Entry) -> Path:
    return objects / entry.name[:2] / entry.name


def entries_of(store: Path, uses: dict[bytes, float], *, toolchains: bool = False) -> Iterator[Entry]:
    """The artifacts of `store`, one by one; with `toolchains` their manifests are read. Raises OSError."""
    opened = Store(store)
    for number, (home, status) in enumerate(homes_of(store)):
        _rest(number)
        try:
            sizes = _sizes(home)
        except (FileNotFoundError, NotADirectoryError):
            continue  # it goes in this very moment
        used = max(status.st_mtime, uses.get(bytes.fromhex(home.name[: 2 * PREFIX]), 0.0))
        toolchain = _toolchain(opened, home.name) if toolchains else ""
        yield Entry(home.name, sum(sizes) + BLOCK, len(sizes) + 1, status.st_mtime, used, toolchain)


def _sizes(home: Path) -> list[int]:
    """Bytes of its files, in whole blocks."""
    with os.scandir(home) as files:
        return [-(-entry.stat(follow_symlinks=False).st_size // BLOCK) * BLOCK for entry in files]


def _toolchain(store: Store, digest: str) -> str:
    """The compiler's version, from the artifact's key: ``triton 3.6.0``. Empty if the key has none, or cannot be read."""
    try:
        encoded = store.manifest_file(digest)
        if encoded is None:
            return ""
        key = Manifest.decode(encoded).explained
    except (ArtifactInvalid, StoreError):
        return ""
    names = (*_TOOLCHAIN, key.backend.partition("-")[0])
    factors = (f for f in (*key.factors, *key.details) if f.text)
    versions = {f.name: f.text for f in factors if f.name in names or _VERSION.fullmatch(f.text)}
    return " ".join(f"{name} {text}" for name, text in sorted(versions.items()))


def _rest(number: int) -> None:
    if number % _REST_EVERY == _REST_EVERY - 1:
        time.sleep(_REST)


# What is no artifact.


def _tidy(store: Path, tidying: Tidying, now: float, found: Collected) -> None:
    """Raises OSError, `StoreError`."""
    v1 = store / "v1"
    found.count("deleted for good", Trash(v1 / "trash").empty(tidying.grace))
    found.count("stale staging", sweep(v1 / "staging"))
    found.count("quarantined", tidy_quarantine(v1 / "quarantine", Trash(v1 / "trash"), tidying, now))
    found.count("traces", _tidy_traces(v1 / "traces", tidying.traces_for, now))
    found.count("outcomes of leases", _tidy_leases(v1 / "leases", now))
    found.count("notes of use, merged", merge_uses(store, now))


def tidy_quarantine(quarantine: Path, trash: Trash, tidying: Tidying, now: float) -> int:
    """Take away what has been there for too long, and the oldest of too many. Raises OSError."""
    there = sorted(_times(quarantine), key=lambda t: t[1])
    excess = max(0, len(there) - tidying.quarantined)
    old = [path for number, (path, at) in enumerate(there) if number < excess or now - at > tidying.quarantine_for]
    return sum(trash.take(path) is not None for path in old)


def _times(directory: Path) -> list[tuple[Path, float]]:
    """What lies there, and when it came there."""
    found = []
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(directory.lstat().st_mode):
            with os.scandir(directory) as entries:
                for entry in entries:
                    with suppress(FileNotFoundError):
                        found.append((Path(entry.path), entry.stat(follow_symlinks=False).st_ctime))
    return found


def _tidy_traces(traces: Path, kept_for: float, now: float) -> int:
    """Files that have not changed for so long; a job's directory a day after its last file: an agent may be about to use it."""
    removed = 0
    for job, _ in _times(traces):
        removed += _unlink_old(job, ".spans", kept_for, now)
        with suppress(OSError):  # it holds something
            if now - job.lstat().st_mtime > 86400.0:
                job.rmdir()
    return removed


def _tidy_leases(leases: Path, now: float) -> int:
    removed = 0
    for bucket, _ in _times(leases):
        if _BUCKET.fullmatch(bucket.name):
            removed += _unlink_old(bucket, _OUTCOME, _OUTCOMES_FOR, now)
            removed += _unlink_old(bucket, _MARKER, _MARKERS_FOR, now)
            removed += _unlink_old(bucket, _ASIDE, _OUTCOMES_FOR, now)
    return removed


def _unlink_old(directory: Path, suffix: str, kept_for: float, now: float) -> int:
    """Plain files of `directory` that nobody has written for so long. A link is not followed."""
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
