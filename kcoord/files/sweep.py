"""Removes stale entries of a staging directory, whose writers are dead.

The name of an entry states its owner: ``<host>-<pid>-<token>``, and the token its boot and pid namespace
(`kcoord.files.atomic.staging_name`). Entries with other names are left alone.

====================================== =====================================================================
owner                                  removed
====================================== =====================================================================
a process of this boot and pid         when no process has its number, and the entry is older than some minutes
namespace
any other                              when the entry is older than a day: nobody can tell whether the owner lives
====================================== =====================================================================

Ages are differences of the file system's own time stamps; no two clocks are compared.
Not guaranteed: that one pass removes all (work is bounded), nor that a writer on another host that takes more than a day
finds its files again; then its rename fails, and its kernel stays on its node.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from kcoord.files import beneath
from kcoord.files.atomic import place, staging_name

HERE_AFTER = 300.0  # seconds
ELSEWHERE_AFTER = 86400.0
_MOST_REMOVED = 200
_MOST_SEEN = 10_000
_NAME = re.compile(
    r"(?P<host>.+)-(?P<pid>[1-9]\d{0,9})-(?P<place>[0-9a-f]{8})?(?P<token>[0-9a-f]{12})"
    r"(?:\.(?:part|probe|spans|swept))?"
)


def sweep(
    staging: Path, root: Path | None = None, *, here_after: float = HERE_AFTER, elsewhere_after: float = ELSEWHERE_AFTER
) -> int:
    """Remove stale entries of `staging`, in bounded work; returns their number. Safe in many processes at once.

    `root`: see `kcoord.files.beneath`; without it no link in the place of `staging` is followed.

    Raises OSError if the directory cannot be listed, or its clock not be read: on a disk that takes no writes nothing is removed.
    Blocks for as long as the file system does.
    """
    removed, root = 0, root or staging.parent
    try:
        now = beneath.touched(staging, root)
        for path, pid, found in _owned(staging, root):
            age = now - found.st_ctime  # no writer can set it, and a copy keeps the mtime of its source
            if age > elsewhere_after if pid is None else age > here_after and not lives(pid):
                removed += _remove(path, root)
            if removed >= _MOST_REMOVED:
                break
    except (FileNotFoundError, NotADirectoryError):
        pass  # nothing was ever staged; or the maker of a link would choose where we remove
    return removed


def lives(pid: int) -> bool:
    """True if process `pid` exists. So does one that nobody has waited for, and another one that has its number by now."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # another user's
    return True


def _owned(staging: Path, root: Path) -> Iterator[tuple[Path, int | None, os.stat_result]]:
    """The entries whose names state an owner, with its pid (None: of another host, boot or namespace) and their status."""
    here = os.uname().nodename, place()
    for name, found in list(islice(beneath.listed(staging, root), _MOST_SEEN)):
        match = _NAME.fullmatch(name)
        if match is not None:
            is_here = (match["host"], match["place"]) == here
            yield staging / name, int(match["pid"]) if is_here else None, found


def _remove(path: Path, root: Path) -> bool:
    """Remove a file or a directory. It is renamed first, so that an owner that lives cannot publish half of it."""
    doomed = path.with_name(f"{staging_name()}.swept")
    try:
        beneath.rename(path, doomed, root)
    except OSError:
        return False  # removed by another process, or owned by another user
    beneath.remove(doomed, root)
    return True
