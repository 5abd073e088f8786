"""The times at which artifacts were last used: coarse, and without a write for each load.

An agent remembers the artifacts that its ranks asked for and loaded. Once a day, and when it ends, it leaves one file in
``<store>/v2/used/``, named after its content; nodes that used the same artifacts write one file, and the next day touch it. The
file's modification time, which the file server sets, is the time of use. `merge_uses` turns many old files into one.

An artifact is known by the first 16 digits of its digest, as in spans: two that share these keep each other.

Not guaranteed: that a use is known before a day has passed, nor the uses of a node that was killed before it wrote. So a limit
for unused artifacts should be days, not hours. A forged use keeps an artifact; none removes one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from pathlib import Path

from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files import beneath
from kcoord.files.atomic import CHECK, LAYOUT, body_of, replace_file, with_check
from kcoord.files.faults import store_error, store_errors
from kcoord.files.reading import read_plain

PREFIX = 8  # bytes of a digest
MOST_USES = 100_000  # of one agent
_MOST_MERGED = 4_000_000
# a prefix, and its time in Unix seconds of the file system; 0: when the file was last touched
_RECORD = struct.Struct(f">{PREFIX}sQ")
_FORMAT = b"kcoord-used-1\n"
_SUFFIX = ".used"
_MERGED_ABOVE = 64  # files
_SETTLED = 3600.0  # seconds: an older file is not just being touched; if it is missed tomorrow it is written again
_FORGOTTEN = 400 * 86400.0
_ATTEMPTS = 5


def prefix_of(digest: str) -> bytes:
    """The first bytes of a digest of 16 digits or more. Raises ValueError."""
    prefix = bytes.fromhex(digest[: 2 * PREFIX])
    if len(prefix) != PREFIX:
        raise ValueError(f"{digest!r} is too short")
    return prefix


def note_uses(store: Path, prefixes: Collection[bytes]) -> None:
    """Note that the artifacts with `prefixes` are in use now: touch a file, or write it if it is new. Raises `StoreError`."""
    if not prefixes:
        return
    chosen = sorted(prefixes)[:MOST_USES]
    name = hashlib.sha256(b"".join(chosen)).hexdigest() + _SUFFIX
    directory = _directory(store)
    with store_errors(directory):
        try:
            os.utime(directory / name, follow_symlinks=False)
        except FileNotFoundError:
            _write(store, name, ((prefix, 0.0) for prefix in chosen))


def load_uses(store: Path) -> dict[bytes, float]:
    """Prefix → time of its last use, in seconds of the file system's clock. Raises `StoreError`: then no use is known."""
    return _fold(store, lambda path: True)


def merge_uses(store: Path, now: float) -> int:
    """Make one file of those that nobody touches now, if they are many; returns how many went. Raises `StoreError`.

    `now` is the file system's time. The new file is there before the others go, so a process that is killed loses nothing, and
    neither do two at once.
    """
    settled: dict[Path, float] = {}

    def settles(path: Path) -> bool:
        touched = path.lstat().st_mtime
        if now - touched > _SETTLED:
            settled[path] = touched
        return path in settled

    merged = _fold(store, settles)
    if len(settled) <= _MERGED_ABOVE:
        return 0
    kept = [(prefix, at) for prefix, at in merged.items() if now - at < _FORGOTTEN]
    body = sorted(sorted(kept, key=lambda use: -use[1])[:_MOST_MERGED])
    name = hashlib.sha256(b"".join(_RECORD.pack(prefix, int(at)) for prefix, at in body)).hexdigest() + _SUFFIX
    removed = 0
    with store_errors(_directory(store)):
        _write(store, name, body)
        for path, touched in settled.items():
            with suppress(FileNotFoundError):
                if path.name != name and path.lstat().st_mtime == touched:
                    beneath.unlink(path, store)
                    removed += 1
    return removed


def _directory(store: Path) -> Path:
    return store / LAYOUT / "used"


def _write(store: Path, name: str, uses: Iterable[tuple[bytes, float]]) -> None:
    """Raises OSError."""
    directory = _directory(store)
    with suppress(FileExistsError):
        directory.mkdir()
    body = b"".join(_RECORD.pack(prefix, int(at)) for prefix, at in uses)
    replace_file(directory / name, with_check(_FORMAT, body), store / LAYOUT / "staging", store)


def _fold(store: Path, chosen: Callable[[Path], bool]) -> dict[bytes, float]:
    """Prefix → time of its latest use, by the `chosen` files; one file is in memory at a time. Raises `StoreError`.

    Looks again if a file vanishes between listing and reading: it was merged into another.
    """
    directory = _directory(store)
    for _ in range(_ATTEMPTS):
        found: dict[bytes, float] = {}
        try:
            with os.scandir(directory) as entries:
                names = sorted(e.name for e in entries if e.name.endswith(_SUFFIX))
            for name in names:
                if chosen(directory / name):
                    _add(found, directory / name)
        except FileNotFoundError:
            if not directory.is_dir():
                return {}
            continue
        except OSError as error:
            if error.errno == errno.ESTALE:  # as above, on NFS v3
                continue
            raise store_error(error, directory) from error
        return found
    raise StoreError(f"{directory}: its files come and go: run one 'kcoord gc' at a time")


def _add(found: dict[bytes, float], path: Path) -> None:
    """Add the uses of one file, as long as there is room for them; a damaged or foreign one has none. Raises OSError."""
    touched = path.lstat().st_mtime
    try:
        body = body_of(_FORMAT, read_plain(path, len(_FORMAT) + CHECK + _MOST_MERGED * _RECORD.size))
        records = _RECORD.iter_unpack(body)
    except (ArtifactInvalid, ValueError, struct.error):
        return
    for prefix, stated in records:
        at = min(float(stated), touched) or touched  # no use is later than its file
        if found.get(prefix, 0.0) < at and (prefix in found or len(found) < _MOST_MERGED):
            found[prefix] = at
