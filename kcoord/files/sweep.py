"""Removing what dead writers left in a staging directory.

A name there says whose it is: ``<host>-<pid>-<token>``, and the token on which boot and in which pid namespace
(`kcoord.files.naming.staging_name`). Whatever has another form of name is left alone.

====================================== =====================================================================
whose                                  removed
====================================== =====================================================================
of this boot and pid namespace         when its process has ended, or is younger than what it is to have left (a
                                       pid that is used again), and it is older than some minutes
anybody else's                         when it is older than a day: nobody can tell whether its owner lives
====================================== =====================================================================

Ages are differences of the file system's own time stamps, and of a process's age on this host; no two clocks are compared.
Not guaranteed: that everything goes at once (work is bounded), nor that a writer which takes more than a day on another
host finds its files again; it is told so by its rename, and its kernel stays on its node.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from kcoord.files.naming import (
    place,
    staging_name,
)

HERE_AFTER = 300.0  # seconds
ELSEWHERE_AFTER = 86400.0
_MOST_REMOVED = 200
_MOST_SEEN = 10_000
_SLACK = 60.0  # seconds; a process this much younger than a directory has not made it
_NAME = re.compile(
    r"(?P<host>.+)-(?P<pid>[1-9]\d{0,9})-(?P<place>[0-9a-f]{8})?(?P<token>[0-9a-f]{12})"
    r"(?:-own)?(?:\.(?:part|marker|probe|spans|swept))?"
)


@dataclass(frozen=True)
class _Owner:
    host: str
    pid: int
    place: str

    @property
    def is_here(self) -> bool:
        """Whether a pid of ours means the same process."""
        return self.host == os.uname().nodename and self.place == place()


def sweep(staging: Path, *, here_after: float = HERE_AFTER, elsewhere_after: float = ELSEWHERE_AFTER) -> int:
    """Remove what is stale in `staging`, as far as that is bounded work; returns how much. Safe in many processes at once.

    Raises OSError if the directory cannot be listed, or its clock not be read: on a disk that takes no writes nothing is removed.
    Blocks for as long as the file system does.
    """
    removed = 0
    try:
        now = touched(staging)
        for path, owner in _owned(staging):
            with suppress(OSError):  # gone this very moment, or not ours to judge
                age = now - path.lstat().st_ctime  # what no writer can set: a copied directory has its model's mtime
                if age > here_after and not lives(owner.pid, age) if owner.is_here else age > elsewhere_after:
                    removed += _remove(path)
            if removed >= _MOST_REMOVED:
                break
    except FileNotFoundError:
        pass  # nobody has staged anything there
    return removed


def sweep_left_by(staging: Path, pid: int, spared: Collection[str] = ()) -> int:
    """Remove at once what process `pid` of this host left in `staging`, but for the names in `spared`; returns how much.

    Nothing is removed while there is such a process. Raises OSError if the directory cannot be listed.
    """
    removed = 0
    with suppress(FileNotFoundError):
        for path, owner in _owned(staging):
            if owner.pid == pid and owner.is_here and path.name not in spared and not lives(pid):
                removed += _remove(path)
    return removed


def sweep_beside(path: Path) -> int:
    """Remove what dead processes of this host left as they were about to write `path`, as ``.<its name>.<staging name>``.

    Returns how much. Raises OSError if the directory cannot be listed.
    """
    removed = 0
    prefix = f".{path.name}."
    for name in os.listdir(path.parent):  # noqa: PTH208
        match = _NAME.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if match is None:
            continue
        owner = _owner(match)
        if owner.is_here and not lives(owner.pid):
            with suppress(OSError):  # another was faster, or it is another user's
                path.with_name(name).unlink()
                removed += 1
    return removed


def lives(pid: int, since: float = 0.0) -> bool:
    """Whether there is a process `pid`, and it is not known to be younger than `since` seconds."""
    if not _exists(pid):
        return False
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        state, started = fields[0], int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return _exists(pid)  # hidden from us, or it has ended this very moment
    if state in (b"Z", b"X"):
        return False
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started + _SLACK >= since


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return True


def touched(directory: Path) -> float:
    """The file system's own time now, in seconds. Nothing is made for it, which a full disk would refuse."""
    os.utime(directory)
    return directory.stat().st_ctime


def _owned(staging: Path) -> Iterator[tuple[Path, _Owner]]:
    """What lies there under a name that tells its owner. Raises OSError."""
    if not stat.S_ISDIR(staging.lstat().st_mode):
        return  # whoever made a link of it would choose where we remove
    with os.scandir(staging) as entries:
        names = [entry.name for entry in islice(entries, _MOST_SEEN)]
    for name in names:
        match = _NAME.fullmatch(name)
        if match is not None:
            yield staging / name, _owner(match)


def _owner(match: re.Match[str]) -> _Owner:
    return _Owner(match["host"], int(match["pid"]), match["place"] or "")


def _remove(path: Path) -> bool:
    """A directory gets another name first: an owner that lives after all cannot publish what is half removed."""
    try:
        if stat.S_ISDIR(path.lstat().st_mode):
            doomed = path.with_name(f"{staging_name()}.swept")
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)  # what an NFS client holds open (.nfsXXXX) goes next time
        else:
            path.unlink()
    except OSError:
        return False  # another sweeper was faster, or it is another user's
    return True
