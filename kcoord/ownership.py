"""The users who may put files into a directory, or another directory in its place: by the owners and modes on the way to it.

This user and root are trusted, and the host's users that a container cannot name (in a user namespace), among them the host's
root. Not seen: access control lists of NFS v4, and what other hosts may do on a shared file system.
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MOST_LINKS = 40  # as Linux


@dataclass(frozen=True)
class Doubt:
    """A problem with the owner or the mode of `path`, or of what is `above` it. `mode`: chmod is a remedy."""

    path: str
    finding: str
    mode: bool = False
    above: bool = False

    def __str__(self) -> str:
        return f"{self.path}: {self.finding}"


def doubt_of(directory: str | os.PathLike[str], shelter: str = "") -> Doubt | None:
    """The reason why another user may write to `directory`, or replace it; None if nobody else can.

    Of a directory that does not exist, the last one on the way to it that does is judged in its place. Symbolic links that
    nobody else can change are followed. `shelter` is a directory, by its real path, that nobody else can enter: modes below it do
    not count, owners do. Raises OSError, also for a way that this user cannot go.
    """
    *above, (last, found) = _way(os.path.abspath(directory))  # noqa: PTH100 - also of a relative TRITON_CACHE_DIR
    if not stat.S_ISDIR(found.st_mode):
        return Doubt(last, "it is no directory")
    if (finding := finding_of(last, found, sheltered=_is_in(last, shelter))) is not None:
        return Doubt(last, finding, mode=is_ours(found.st_uid) and not found.st_mode & stat.S_ISVTX)
    name = os.fspath(directory)
    doubts = (_doubt_above(name, path, status, sheltered=_is_in(path, shelter)) for path, status in above)
    return next(filter(None, doubts), None)


def finding_of(path: str, found: os.stat_result, *, sheltered: bool = False) -> str | None:
    """The reason why another user may change the file or directory at `path`; None: it is ours or root's, and nobody else may.

    `sheltered`: it lies in a directory that nobody else can enter, so its mode does not count.
    """
    if not is_ours(found.st_uid):
        anybody = ", whom this user namespace does not map: that may be anybody" if found.st_uid == os.geteuid() else ""
        return f"it belongs to user {found.st_uid}{anybody}"
    who = "" if sheltered else _other_writers(path, found)
    return f"{who} may write to it" if who else None


def is_ours(uid: int) -> bool:
    """True for this user and root, unless `uid` stands for users whom this user namespace does not map."""
    return uid in (os.geteuid(), 0) and uid != _unmapped(os.geteuid())


def is_safe_to_share(directory: str | os.PathLike[str]) -> bool:
    """True if nobody else can rename or replace this user's entries of `directory`, as in ``/tmp``. Raises OSError."""
    return not any(_doubt_above("", path, status) for path, status in _way(os.path.abspath(directory)))  # noqa: PTH100


def _is_in(path: str, shelter: str) -> bool:
    return bool(shelter) and path.startswith(f"{shelter.rstrip('/')}/")


def _way(path: str) -> Iterator[tuple[str, os.stat_result]]:
    """Every directory and link that the kernel passes on its way to `path`, from ``/`` to the last one that exists."""
    here, links = "/", 0
    yield here, os.lstat(here)
    left = path.split("/")[::-1]
    while left:
        part = left.pop()
        if part in ("", "."):
            continue
        if part == "..":
            here = os.path.dirname(here)  # noqa: PTH120
            continue
        entry = f"{here.rstrip('/')}/{part}"
        try:
            found = os.lstat(entry)
        except (FileNotFoundError, NotADirectoryError):
            return
        yield entry, found
        if not stat.S_ISLNK(found.st_mode):
            here = entry
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(entry)  # noqa: PTH115
        here = "/" if target.startswith("/") else here
        left += target.split("/")[::-1]


def _doubt_above(directory: str, path: str, found: os.stat_result, *, sheltered: bool = False) -> Doubt | None:
    """A doubt of `directory`, for the sake of `path` on the way to it."""
    if not _is_trusted(found.st_uid):
        return Doubt(directory, f"user {found.st_uid}, who owns {path}, may replace it", above=True)
    if sheltered or stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
        return None
    who = _other_writers(path, found)
    # a mount point that its administrator left open is for those who see the mount: a volume of a Kubernetes pod is such
    if not who or (is_ours(found.st_uid) and os.path.ismount(path)):
        return None
    return Doubt(directory, f"{who} may replace it, by a rename in {path}", above=True)


def _other_writers(path: str, found: os.stat_result) -> str:
    """Words for the other users who may write to the directory at `path`; empty if there are none."""
    if found.st_mode & stat.S_IWOTH:
        return "everybody"
    if found.st_mode & stat.S_IWGRP and (_has_list(path) or not (found.st_gid == 0 or _is_private(found.st_gid))):
        return f"group {found.st_gid}"
    return ""


def _has_list(path: str) -> bool:
    """True if a POSIX access control list names more users; its mask shows as the group's rights."""
    with suppress(OSError):
        return bool(os.getxattr(path, "system.posix_acl_access", follow_symlinks=False))
    return False


def _is_private(gid: int) -> bool:
    """True for the group of this user alone, as distributions make one, of the same name, for each user."""
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return (gid, group.gr_name) == (user.pw_gid, user.pw_name) and set(group.gr_mem) <= {user.pw_name}


def _is_trusted(uid: int) -> bool:
    return uid in (os.geteuid(), 0) or uid == _unmapped(os.geteuid())


@functools.lru_cache(maxsize=16)
def _unmapped(euid: int) -> int | None:
    """The uid that stands for every user whom this user namespace does not map; None if that uid is a user's.

    A process that enters another user namespace gets another `euid`.
    """
    try:
        uid = int(Path("/proc/sys/kernel/overflowuid").read_text())
        ranges = [tuple(map(int, line.split())) for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return None
    return None if any(first <= uid < first + count for first, _, count in ranges) else uid
