"""The files of one key: a marker, which is the lease, and an outcome. Every call blocks for as long as the file system does.

The marker is `filelock.SoftFileLease`'s: made by ``O_CREAT | O_EXCL``, touched by its heartbeat, and taken over at once where its
process can be seen to be dead. Two gaps of filelock are closed here: it replaces an expired marker by exchanging two names, which
NFS refuses, and it keeps an empty marker (its writer died, or its disk was full) for ever. So a marker that was not touched for
its duration is moved aside, and the key is free for everybody.

This process's monotonic clock measures how long a marker is untouched: the clocks of hosts need not agree. A marker that changed
did so between two looks at it. Its modification time, by the file system's clock, says when, and is believed within these bounds.
"""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import filelock
import msgpack

from kcoord.errors import ArtifactInvalid
from kcoord.files import beneath
from kcoord.files.atomic import replace_file, staging_name
from kcoord.files.reading import read_plain
from kcoord.files.rename import refresh_names
from kcoord.leases.base import Failed, Ready, Wait

_LARGEST_OUTCOME = 256 << 10  # bytes
_LONGEST_LOG = 32 << 10  # characters
_LONGEST_WORD = 1 << 10
_LONGEST_DURATION = 3600.0  # seconds; a longer duration in a marker is not believed
_TRIES = 3
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EISDIR, errno.ENXIO, errno.EAGAIN)
_UNREADABLE = (errno.ELOOP, errno.ENXIO, errno.EACCES, errno.EPERM)  # a symbolic link, a socket, another user's file
_SOMEBODY = "another node"


class NotALease(Exception):
    """The marker's place is taken by something that cannot be moved aside, a directory: nobody can lease this key."""


@dataclass
class _Marker:
    """Another holder's marker. It was touched between `after` and `seen`; times are in seconds of this process's clock."""

    identity: tuple[int, int, int]  # inode, modification and change time
    host: str
    duration: float
    after: float
    seen: float
    looked: float  # when the latest look began that found it unchanged
    touched: float | None  # None until it matters


class KeyFiles:
    """One key's files in `directory`, for one thread at a time (`changes` excepted). Raises OSError.

    Files are made in `staging`, on the same file system, before they get their names; agents sweep it.
    """

    def __init__(self, directory: Path, staging: Path, name: str, ttl: float, failure_ttl: float) -> None:
        self._directory, self._staging, self._root = directory, staging, _store_of(staging)
        self._marker = directory / f"{name}.lease"
        self._outcome = directory / f"{name}.outcome"
        self._ttl, self._failure_ttl = ttl, failure_ttl
        self._lease = self._new_lease()
        self._unremoved: list[filelock.SoftFileLease] = []  # given back, with a marker that a fault kept
        self._known: _Marker | None = None  # another holder's

    def _new_lease(self) -> filelock.SoftFileLease:
        return filelock.SoftFileLease(self._marker, lease_duration=self._ttl, thread_local=False)

    def attempt(self, void: str | None) -> Ready | Failed | Wait | None:
        """The outcome, if there is one; else who has the lease; else None: it is ours now. `void` is no outcome.

        Raises `NotALease`.
        """
        self._remove_again()
        found = self._read_outcome(void) or self._take()
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

    def standing(self, void: str | None) -> Ready | Failed | bool:
        """For a lease that was taken here: the outcome that ended it, else True if it is still ours."""
        outcome = self._read_outcome(void)
        if outcome is not None:
            return outcome
        owner = self._lease.owner
        ours = owner is not None and owner.token == self._lease.token
        if (
            ours and self._lease.compromise is not None
        ):  # the heartbeat gave up: the file system failed for most of the TTL
            with suppress(OSError):
                os.utime(self._marker, follow_symlinks=False)
        return ours

    def release(self) -> None:
        """Remove the marker, if it is ours. One that cannot be removed is given back as well: nobody touches it any more.

        From 4.3 on, filelock still holds a lease whose marker it could not remove, and would acquire it again at once.
        """
        try:
            self._lease.release(force=True)
        except OSError:
            self._unremoved.append(self._lease)
            self._lease = self._new_lease()

    def _remove_again(self) -> None:
        """Remove markers that `release` could not, unless they are another's by now, and close their files."""
        tried, self._unremoved = self._unremoved, []
        for lease in tried:
            try:
                lease.release(force=True)
            except OSError:
                self._unremoved.append(lease)

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
                age = file_system_now(self._staging) - self._outcome.lstat().st_mtime
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

    def _take(self) -> Wait | None:
        for _ in range(_TRIES):
            try:
                self._lease.acquire(blocking=False)
            except (
                filelock.Timeout,
                filelock.LeaseSettingsMismatch,
            ):  # a holder with another TTL is waited for as long
                pass
            except (IsADirectoryError, PermissionError) as error:
                if isinstance(error, PermissionError) and not os.access(self._directory, os.W_OK):
                    raise
                raise NotALease(f"{self._marker}: {error.strerror}") from error
            else:
                self._known = None
                return None
            marker = self._observe()
            if marker is None:
                continue  # it was given back just now
            left = self._left(marker)
            if left > 0:
                return Wait(marker.host, left)
            self._set_aside(marker)
        return Wait(_SOMEBODY, 0.05)  # others are faster

    def _observe(self) -> _Marker | None:
        """Look at another's marker, and remember it."""
        began, before = time.monotonic(), self._known
        found = _stat(self._marker)
        if found is None:
            self._known = None
            return None
        if before is not None and before.identity == _identity(found):
            before.looked = began
            return before
        changed = before is not None and before.identity[0] == found.st_ino
        owner, now = self._lease.owner, time.monotonic()
        host, duration = _SOMEBODY, self._ttl
        if owner is not None:
            host = owner.hostname.partition("?")[0] or _SOMEBODY
            duration = min(max(owner.lease_duration or 0.0, self._ttl), _LONGEST_DURATION)
        after = before.looked if changed and before is not None else now
        touched = None if changed else now  # at the first look its age is unknown: it gets its whole time
        self._known = _Marker(_identity(found), host, duration, after, now, began, touched)
        return self._known

    def _left(self, marker: _Marker) -> float:
        """Seconds until the marker has expired; not above 0 if it has."""
        now = time.monotonic()
        if marker.touched is None and marker.after + marker.duration <= now:
            age = file_system_now(self._staging) - marker.identity[1] / 1e9
            marker.touched = min(max(time.monotonic() - age, marker.after), marker.seen)
        start = marker.after if marker.touched is None else marker.touched
        return start + marker.duration - now

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
    except NotADirectoryError:
        if directory.parents[2].is_file():  # as good as no store
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(directory)) from None
    beneath.check(directory, directory.parents[2])


def _store_of(staging: Path) -> Path:
    return staging.parents[1]


def file_system_now(staging: Path) -> float:
    """The file system's own clock, in seconds; comparable to its modification times only."""
    beneath.check(staging, _store_of(staging))
    probe = staging / f"{staging_name()}.part"
    descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        beneath.unlink(probe, _store_of(staging))


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
