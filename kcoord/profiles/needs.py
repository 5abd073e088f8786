"""Needs: which artifacts the jobs of a profile asked for, as digests of their keys, and where in the local tier they lie.

A profile's recipes outlive a change of the compiler or of the kernel's source, so they name no artifacts. Needs are the other
half: what was asked for with *these* versions, good for bringing exactly that to a node before its job starts, and worthless
after a change (then artifacts of that name are not asked for, and nobody is harmed).

They are ``<store>/v1/needs/<profile>/``, in files as a profile's parts are: each agent renames its own into place, named after
what is in it, so that equal nodes write one file; reading merges them; nothing is locked. Not trusted: a file may be torn,
another version's or another user's. The worst that a forged one does is to have artifacts fetched that nobody needs: each is
verified, and is its key's.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgpack

from kcoord.artifacts.publish import staging_name, store_error, sync_directory, write_files
from kcoord.artifacts.reading import read_plain
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.settings import is_profile_name

MOST_NEEDS = 100_000  # of a profile
_LARGEST_FILE = 32 << 20  # bytes
_MOST_FILES = 4096
_ATTEMPTS = 5
_FORMAT = b"kcoord-needs-1\n"
_CHECK = hashlib.sha256().digest_size
_SUFFIX = ".needs"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PLACE = re.compile(
    r"triton/[A-Za-z0-9_=-]{1,200}|objects/[0-9a-f]{2}/[0-9a-f]{64}"
)  # nothing else of the local directory


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
    paths = _files(directory)
    found: dict[Need, None] = {}
    for path in sorted(paths[:_MOST_FILES], key=_written, reverse=True):
        for need in _read(path):
            if len(found) >= MOST_NEEDS:
                return list(found)
            found.setdefault(need)
    return list(found)


def all_needs(directory: Path) -> set[Need]:
    """As `load_needs`, for whoever removes what is not needed: complete, or `StoreError`."""
    for _ in range(_ATTEMPTS):
        paths = _files(directory)
        found = [_read(path) for path in paths]
        if paths == _files(directory):  # else a writer has just put a larger file in the place of one that we missed
            unread = [path for path, needs in zip(paths, found, strict=True) if not needs]
            if unread or len(paths) > _MOST_FILES:
                where = unread[0] if unread else directory
                raise StoreError(f"{where}: what is needed cannot be read: look at it, or remove it")
            return {need for needs in found for need in needs}
    raise StoreError(f"{directory}: it changes all the time: try again later")


def save_needs(directory: Path, needs: Collection[Need], earlier: Path | None = None) -> Path:
    """Write `needs`, in their order, as one file, atomically; returns its path. Raises `StoreError`.

    `earlier` is what the same writer's last call returned, and all in it must be in `needs`: it is removed.
    """
    names = sorted(f"{need.digest} {need.place}" for need in needs)
    path = directory / f"{hashlib.sha256(chr(10).join(names).encode()).hexdigest()}{_SUFFIX}"
    body = msgpack.packb([[need.digest, need.place] for need in needs])
    fresh = directory / f".{staging_name()}"
    try:
        write_files(directory, {fresh.name: _FORMAT + hashlib.sha256(body).digest() + body}, durable=True)
        fresh.replace(path)
        sync_directory(directory)
        if earlier is not None and earlier != path:
            earlier.unlink(missing_ok=True)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise store_error(error, directory) from error
    return path


def _files(directory: Path) -> list[Path]:
    """Raises `StoreError`."""
    try:
        return sorted(p for p in directory.iterdir() if p.suffix == _SUFFIX and not p.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise store_error(error, directory) from error


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # its writer has just put a larger one in its place


def _read(path: Path) -> list[Need]:
    try:
        content = read_plain(path, _LARGEST_FILE)
        start = len(_FORMAT) + _CHECK
        if content[:start] != _FORMAT + hashlib.sha256(content[start:]).digest():
            return []
        plain = msgpack.unpackb(content[start:])
        if not isinstance(plain, list) or len(plain) > MOST_NEEDS:
            return []
        return [Need(*entry) for entry in plain]
    except (OSError, ArtifactInvalid, ValueError, TypeError, msgpack.exceptions.UnpackException):
        return []
