"""The files of one key: a marker, which is the lease, and an outcome. Every call blocks for as long as the file system does.

A marker is made by ``O_CREAT | O_EXCL``, which one of many wins, on NFS too. It states its holder, for how long it counts
untouched, and a token; each renewal touches it. After that time it is moved aside, and the key is free for everybody. So a
marker that its writer left empty, or that is none, holds its key up for a TTL.

This process's monotonic clock measures how long a marker is untouched, from the look that found it changed: the clocks of hosts
need not agree.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgpack

from kcoord.errors import ArtifactInvalid
from kcoord.files import beneath
from kcoord.files.atomic import replace_file, staging_name
from kcoord.files.reading import read_plain
from kcoord.files.rename import refresh_names
from kcoord.leases.base import Failed, Ready, Wait

_LARGEST_MARKER, _LARGEST_OUTCOME = 8 << 10, 256 << 10  # bytes
_LONGEST_LOG = 32 << 10  # characters
_LONGEST_WORD = 1 << 10
_LONGEST_DURATION = 3600.0  # seconds; a longer duration in a marker is not believed
_TRIES = 3
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENXIO, errno.EAGAIN)
_UNREADABLE = (errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)  # a symbolic link, a socket, another user's file
_SOMEBODY = "another node"


class NotALease(Exception):
    """The marker's place is taken by something that cannot be moved aside, a directory: nobody can lease this key."""


@dataclass(frozen=True)
class _Marker:
    """Another holder's marker. It has not changed `since`, and counts for `duration` then; seconds of this process's clock."""

    identity: tuple[int, int, int]  # inode, modification and change time
    holder: str
    duration: float
    since: float


class KeyFiles:
    """One key's files in `directory`, for one thread at a time (`changes` excepted). Raises OSError.

    Outcomes are made in `staging`, on the same file system, before they get their names; agents sweep it.
    """

    def __init__(self, directory: Path, staging: Path, name: str, ttl: float, failure_ttl: float) -> None:
        self._directory, self._staging, self._root = directory, staging, staging.parents[1]
        self._marker = directory / f"{name}.lease"
        self._outcome = directory / f"{name}.outcome"
        self._ttl, self._failure_ttl = ttl, failure_ttl
        self._ours: bytes | None = None  # the content of our marker
        self._known: _Marker | None = None  # another holder's

    def attempt(self, void: str | None, holder: str) -> Ready | Failed | Wait | None:
        """The outcome, if there is one; else who has the lease; else None: it is ours now. `void` is no outcome.

        Raises `NotALease`.
        """
        found = self._read_outcome(void) or self._take(holder)
        if found is not None:
            return found
        try:
            found = self._read_outcome(void)  # it may have been written before we took the lease
            if found is None:
                self._forget_outcome()
                return None
        except BaseException:
            self.release()
            raise
        self.release()
        return found

    def standing(self, void: str | None, *, touch: bool = False) -> Ready | Failed | bool:
        """For a lease that was taken here: the outcome that ended it, else True if it is still ours. `touch`: renew it."""
        outcome = self._read_outcome(void)
        if outcome is not None:
            return outcome
        ours = self._is_ours()
        if ours and touch:
            with suppress(FileNotFoundError):  # the next look finds it gone
                beneath.touch(self._marker, self._root)
        return ours

    def release(self) -> None:
        """Remove the marker, if it is ours. One that cannot be removed is given back as well: nobody touches it any more."""
        with suppress(OSError):
            if self._is_ours():
                beneath.unlink(self._marker, self._root)
        self._ours = None

    def announce(self, outcome: Ready | Failed) -> None:
        """Write the outcome, whole or not at all. A directory in its place stays: then waiters hear nothing."""
        if isinstance(outcome, Ready):
            stated = {"state": "ready", "manifest": outcome.manifest}
        else:
            stated = {"state": "failed", "log": _utf8(outcome.log[-_LONGEST_LOG:]), "where": _utf8(outcome.where)}
        look_up(self._directory)
        try:
            replace_file(self._outcome, msgpack.packb(stated), self._staging, self._root)
        except IsADirectoryError:
            return
        os.utime(self._directory)  # an NFS client that cached "missing" looks again

    def changes(self) -> object:
        """A value that changes with the holder of the lease, and with the outcome."""
        look_up(self._directory)
        marker, outcome = _stat(self._marker), _stat(self._outcome)
        return marker and marker.st_ino, outcome and _identity(outcome)

    # The outcome.

    def _read_outcome(self, void: str | None) -> Ready | Failed | None:
        look_up(self._directory)
        try:
            outcome = _parse(read_plain(self._outcome, _LARGEST_OUTCOME))
            if isinstance(outcome, Failed):
                age = time.time() - self._outcome.lstat().st_mtime
                return outcome if abs(age) < self._failure_ttl else None
        except (FileNotFoundError, PermissionError, ArtifactInvalid):
            return None
        except OSError as error:
            if error.errno == errno.ESTALE:  # replaced or removed while it was read
                return None
            raise
        return None if outcome is None or outcome.manifest == void else outcome

    def _forget_outcome(self) -> None:
        """Remove an outcome that is void, expired or garbage."""
        with suppress(FileNotFoundError, IsADirectoryError, PermissionError):
            beneath.unlink(self._outcome, self._root)

    # The marker.

    def _is_ours(self) -> bool:
        try:
            return self._ours is not None and read_plain(self._marker, _LARGEST_MARKER) == self._ours
        except ArtifactInvalid:
            return False
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return False
            raise

    def _take(self, holder: str) -> Wait | None:
        for _ in range(_TRIES):
            if self._make(holder):
                return None
            marker = self._observe()
            if marker is None:
                continue  # it was given back just now
            left = marker.since + marker.duration - time.monotonic()
            if left > 0:
                return Wait(marker.holder, left)
            self._set_aside(marker)
        return Wait(_SOMEBODY, 0.05)  # others are faster

    def _make(self, holder: str) -> bool:
        """False: something has the marker's name."""
        how = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with beneath.opened(self._directory, self._root) as place:
            try:
                descriptor = os.open(self._marker.name, how, 0o666, dir_fd=place)
            except FileExistsError:
                return False
        content = msgpack.packb([_utf8(holder)[:_LONGEST_WORD], float(self._ttl), staging_name()])
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        except OSError:  # a full disk
            with suppress(OSError):
                beneath.unlink(self._marker, self._root)
            raise
        self._ours, self._known = content, None
        return True

    def _observe(self) -> _Marker | None:
        """Look at another's marker, and remember it."""
        found = _stat(self._marker)
        if found is None:
            self._known = None
            return None
        if stat.S_ISDIR(found.st_mode):
            raise NotALease(f"{self._marker} is a directory")
        if self._known is None or self._known.identity != _identity(found):
            self._known = _Marker(_identity(found), *self._stated(), time.monotonic())
        return self._known

    def _stated(self) -> tuple[str, float]:
        """The holder and the duration that the marker states, within bounds."""
        try:
            holder, duration, _ = msgpack.unpackb(read_plain(self._marker, _LARGEST_MARKER))
            if isinstance(holder, str) and isinstance(duration, float):
                return holder[:_LONGEST_WORD], min(max(duration, self._ttl), _LONGEST_DURATION)
        except (OSError, ArtifactInvalid, ValueError, TypeError, msgpack.exceptions.UnpackException):
            pass  # it is not written yet, or none of ours
        return _SOMEBODY, self._ttl

    def _set_aside(self, marker: _Marker) -> None:
        """Take an expired marker away. One that was touched or replaced just now is put back, if possible: a file system may know
        no links, and Linux lets users link another user's file only if they may write to it.

        It stays in its directory: an NFS v4 server first calls back a vanished host's delegation of the marker, for 90 s, and
        until then a rename into another directory would hold up all other renames of this host, and all files made there.
        """
        self._known = None
        aside = self._directory / f"{staging_name()}.part"
        try:
            beneath.rename(self._marker, aside, self._root)
            found = _stat(aside)
            if found is not None and _identity(found)[:2] != marker.identity[:2]:
                with suppress(OSError):
                    os.link(aside, self._marker, follow_symlinks=False)
        except FileNotFoundError:
            return  # another process was faster; or NFS resent the rename, and it is done
        finally:
            with suppress(FileNotFoundError):
                beneath.unlink(aside, self._root)


def look_up(directory: Path) -> None:
    """Open `directory`, so that an NFS client forgets which names were missing in it. Makes it, and its parent, if need be.

    Raises NotADirectoryError if a link is in its place.
    """
    try:
        refresh_names(directory)
    except FileNotFoundError:  # nothing further up is made: it is no store that is not mounted
        for missing in (directory.parent, directory):
            with suppress(FileExistsError):
                beneath.mkdir(missing, directory.parents[2])
    beneath.check(directory, directory.parents[2])


def _stat(path: Path) -> os.stat_result | None:
    """The state of `path` now: opening a file asks the NFS server, but `lstat` may answer from a cache for a minute."""
    try:
        descriptor = _opened(path)
    except OSError as error:
        if error.errno in _UNREADABLE:
            with suppress(FileNotFoundError):
                return path.lstat()
        elif error.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return None
    try:
        return os.fstat(descriptor)
    finally:
        os.close(descriptor)


def _opened(path: Path) -> int:
    """Open for writing, and write nothing: an NFS v4 server then takes back what it has delegated of the file to its holder, and
    delegates it no more. The delegation of a host that vanishes later would keep others from removing the file, for 90 s.
    """
    how = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(path, os.O_WRONLY | how)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:  # EAGAIN: this host is the server, and has begun to call back
            raise
        return os.open(path, os.O_RDONLY | how)


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_mtime_ns, found.st_ctime_ns


def _parse(content: bytes) -> Ready | Failed | None:
    """None: not an outcome."""
    try:
        stated = msgpack.unpackb(content)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError):
        return None
    if not isinstance(stated, dict):
        return None
    manifest, log, where = stated.get("manifest"), stated.get("log"), stated.get("where")
    if stated.get("state") == "ready" and isinstance(manifest, str) and 0 < len(manifest) <= _LONGEST_WORD:
        return Ready(manifest)
    if stated.get("state") == "failed" and isinstance(log, str) and isinstance(where, str):
        return Failed(log[-_LONGEST_LOG:], where[:_LONGEST_WORD])
    return None


def _utf8(text: str) -> str:
    return text.encode("utf-8", "replace").decode()
