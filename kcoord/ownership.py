"""The one rule for what kcoord loads, and where it writes.

A file or a directory is loaded from if this user or root owns it and nobody else may write to it. Each directory and link on the
way to it must belong to this user or to root, and nobody else may rename what is in it: nobody else may write there, or it is
sticky, as ``/tmp``, or it is a mount point of root's, left open for those who see the mount, as every volume of a Kubernetes pod.

Users that this user namespace does not map, among them the host's root, may own what is on the way, and nothing that is loaded.
Not seen: access control lists of NFS v4, and what other hosts may do on a shared file system.
"""

from __future__ import annotations

import errno
import functools
import grp
import os
import pwd
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

_MOST_LINKS = 40  # as Linux


def doubt_of(directory: str | os.PathLike[str]) -> str:
    """Why another user may write to `directory`, or replace it, after its path; empty if nobody else can.

    Of a directory that does not exist, the last one on the way to it that does is judged in its place. Symbolic links that
    nobody else can change are followed. Raises OSError, also for a way that this user cannot go.
    """
    *above, (last, found) = _way(os.path.abspath(directory))  # noqa: PTH100 - also of a relative TRITON_CACHE_DIR
    if not stat.S_ISDIR(found.st_mode):
        return f"{last}: it is no directory"
    if finding := finding_of(last, found):
        return f"{last}: {finding}"
    finding = _finding_above(above)
    return f"{os.fspath(directory)}: {finding}" if finding else ""


def finding_of(path: str, found: os.stat_result) -> str:
    """Why another user may change the file or directory at `path`; empty if it is ours or root's, and nobody else may."""
    if not is_ours(found.st_uid):
        anybody = ", whom this user namespace does not map: that may be anybody" if found.st_uid == os.geteuid() else ""
        return f"it belongs to user {found.st_uid}{anybody}"
    who = _other_writers(path, found)
    sticky = ", as to /tmp" if found.st_mode & stat.S_ISVTX else ""
    return f"{who} may write to it{sticky}" if who else ""


def is_ours(uid: int) -> bool:
    """True for this user and root, unless `uid` stands for users whom this user namespace does not map."""
    return uid in (os.geteuid(), 0) and uid != _unmapped(os.geteuid())


def make_own(directory: Path) -> str:
    """Create `directory` for this user alone, or look at it; returns why it is not this user's alone, after its path.

    It must be a real directory of this user's. Empty: paths below it are safe to use, and to hand to a compiler, which takes no
    descriptors: nobody else can lead them elsewhere. Raises OSError.
    """
    make_directory(directory)
    found = directory.lstat()
    if stat.S_ISLNK(found.st_mode):
        return f"{directory}: it is a symbolic link"
    if found.st_uid != os.geteuid():
        return f"{directory}: it belongs to user {found.st_uid}"
    return doubt_of(directory)


def make_directory(directory: Path, mode: int = 0o700, above: int = 0o755) -> None:
    """Create `directory`, and those above it that do not exist; the umask only takes away from the modes. Raises OSError."""
    try:
        directory.mkdir(mode=mode)
    except FileNotFoundError:
        make_directory(directory.parent, above, above)
        directory.mkdir(mode=mode, exist_ok=True)
    except FileExistsError:
        if not (directory.is_dir() or directory.is_symlink()):
            raise


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


def _finding_above(way: Iterable[tuple[str, os.stat_result]]) -> str:
    """Why another user may replace what `way` leads to; empty if nobody else can."""
    for path, found in way:
        if not (found.st_uid in (os.geteuid(), 0) or found.st_uid == _unmapped(os.geteuid())):
            return f"user {found.st_uid}, who owns {path}, may replace it"
        if stat.S_ISLNK(found.st_mode) or found.st_mode & stat.S_ISVTX:
            continue
        who = _other_writers(path, found)
        if who and not (is_ours(found.st_uid) and os.path.ismount(path)):
            return f"{who} may replace it, by a rename in {path}"
    return ""


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
