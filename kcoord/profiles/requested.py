"""Needs: which artifacts the jobs of a profile asked for, as digests of their keys, and where in the local tier they lie.

A profile's recipes outlive a change of the compiler or of the kernel's source, so they name no artifacts. Needs are the other
half: what was asked for with *these* versions, good for bringing exactly that to a node before its job starts, and worthless
after a change (then artifacts of that name are not asked for, and nobody is harmed).

They are ``<store>/v1/needs/<profile>/``, in files as a profile's parts are: each agent renames its own into place, named after
what is in it, so that equal nodes write one file; reading merges them; nothing is locked. Old files become one now and then
(`kcoord.profiles.compaction`). Not trusted: a file may be torn, another version's or another user's. The worst that a forged one
does is to have artifacts fetched that nobody needs: each is verified, and is its key's.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgpack

from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files.faults import (
    store_error,
)
from kcoord.files.reading import read_plain
from kcoord.files.shared_directory import paths_of, read_all, save
from kcoord.settings import is_profile_name

MOST_NEEDS = 100_000  # of a profile
_LARGEST_FILE = 32 << 20  # bytes
_MOST_FILES = 4096
_FORMAT = b"kcoord-needs-1\n"
_CHECK = hashlib.sha256().digest_size
_SUFFIX = ".needs"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PLACE = re.compile(
    r"(?!objects/|profiles/|stats/|toolchain/|traces/)[a-z0-9][a-z0-9_-]{0,63}/[A-Za-z0-9_=-]{1,200}"
    r"|objects/[0-9a-f]{2}/[0-9a-f]{64}"
)
"""A compiler's tier or kcoord's; nothing else of the local directory."""


@dataclass(frozen=True)
class Need:
    """The artifact of the key `digest`, at `place` below the local directory. Raises ValueError if these are not tame."""

    digest: str
    place: str

    def __post_init__(self) -> None:
        if not isinstance(self.digest, str) or not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"{self.digest!r:.80} is no digest")
        if not isinstance(self.place, str) or not _PLACE.fullmatch(self.place):
            raise ValueError(f"{self.place!r:.80} is no place in the local directory")


def needs_directory(store: Path, profile: str) -> Path:
    return store / "v1" / "needs" / profile


def needed_profiles(store: Path) -> list[str]:
    """The profiles of which needs are known. Raises `StoreError`."""
    try:
        with os.scandir(needs_directory(store, "")) as found:
            return sorted(
                entry.name for entry in found if entry.is_dir(follow_symlinks=False) and is_profile_name(entry.name)
            )
    except FileNotFoundError:
        return []
    except OSError as error:
        raise store_error(error, store) from error


def load_needs(directory: Path) -> list[Need]:
    """All needs, each once: those of the newest file first, in the order in which they were asked for. None: an empty list.

    What cannot be read is skipped: it is fetched when it is asked for. Raises `StoreError` if the directory cannot be listed.
    Blocks for as long as the file system does.
    """
    files = _read_all(directory)
    found: dict[Need, None] = {}
    for path in sorted(files, key=written, reverse=True):
        for need in files[path]:
            if len(found) >= MOST_NEEDS:
                return list(found)
            found.setdefault(need)
    return list(found)


def all_needs(directory: Path) -> set[Need]:
    """As `load_needs`, for whoever removes what is not needed: complete, or `StoreError`."""
    files = _read_all(directory, complete=True)
    unread = [path for path, needs in files.items() if not needs]
    if unread:
        raise StoreError(f"{unread[0]}: what is needed cannot be read: look at it, or remove it")
    return {need for needs in files.values() for need in needs}


def need_paths(directory: Path) -> list[Path]:
    """The files in `directory`, sorted; none if there is no such directory. Raises OSError."""
    return paths_of(directory, _SUFFIX)


def named_needs(path: Path) -> list[Need]:
    """What is in the file, in its order; nothing if it cannot be read, or is not named after what is in it.

    Whatever a writer puts in the place of one that is, is the same needs.
    """
    needs = _read(path) or []
    return needs if path.name == needs_name(needs) else []


def needs_name(needs: Collection[Need]) -> str:
    """The name of a file that holds `needs`, in whichever order."""
    names = sorted(f"{need.digest} {need.place}" for need in needs)
    return f"{hashlib.sha256(chr(10).join(names).encode()).hexdigest()}{_SUFFIX}"


def written(path: Path) -> float:
    """When, in seconds of the file system's clock; 0.0 for a file that is gone."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # its writer has just put a larger one in its place


def save_needs(directory: Path, needs: Collection[Need], earlier: Path | None = None, at: float | None = None) -> Path:
    """Write `needs`, in their order, as one file, atomically and durably; returns its path. Raises `StoreError`.

    `earlier` is what the same writer's last call returned, and all in it must be in `needs`: it is removed. `at`: what `written`
    is to say of the file, if not now.
    """
    body = msgpack.packb([[need.digest, need.place] for need in needs])
    return save(directory, needs_name(needs), _FORMAT + hashlib.sha256(body).digest() + body, earlier, at)


def _read_all(directory: Path, *, complete: bool = False) -> dict[Path, list[Need]]:
    """What is in each file: nothing in one that cannot be read. `complete`: all there was at one moment, or `StoreError`.

    Raises `StoreError`.
    """
    found: dict[Path, list[Need]] = {}
    known: dict[Need, Need] = {}  # files of one profile hold much the same

    def paths() -> list[Path]:
        there = need_paths(directory)
        if complete and len(there) > _MOST_FILES:
            raise StoreError(f"{directory}: {len(there):,} files are too many: run 'kcoord gc', which merges old ones")
        return there[:_MOST_FILES]

    def read(path: Path) -> bool:
        needs = _read(path)
        found[path] = [known.setdefault(need, need) for need in needs or []]
        return needs is not None

    try:
        there = read_all(paths, read)
    except OSError as error:
        raise store_error(error, directory) from error
    if there is not None:
        return {path: found[path] for path in there}
    if complete:
        raise StoreError(f"{directory}: it changes all the time: try again later")
    return found


def _read(path: Path) -> list[Need] | None:
    """None: it is gone. Empty: it cannot be read."""
    try:
        content = read_plain(path, _LARGEST_FILE)
        start = len(_FORMAT) + _CHECK
        if content[:start] != _FORMAT + hashlib.sha256(content[start:]).digest():
            return []
        plain = msgpack.unpackb(content[start:])
        if not isinstance(plain, list) or len(plain) > MOST_NEEDS:
            return []
        return [Need(*entry) for entry in plain]
    except OSError as error:
        return None if error.errno in (errno.ENOENT, errno.ESTALE) else []  # the latter on NFS v3
    except (ArtifactInvalid, ValueError, TypeError, msgpack.exceptions.UnpackException):
        return []
