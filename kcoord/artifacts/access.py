"""Checks the access to a store: its upper directories should be writable only by users that may publish.

A user who may put another directory in the place of ``objects`` decides what nodes find. Where signatures are required they
cannot make ranks load it, but can still make them compile and wait. Not checked: access control lists, and file system exports.
"""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from kcoord.files.atomic import LAYOUT


@dataclass(frozen=True)
class Doubt:
    """A problem with the owner or the mode of `path`, and its remedy."""

    path: Path
    finding: str
    remedy: str


def doubts(root: Path) -> list[Doubt]:
    """The problems of the store at `root`, and of the store that its namespace is in. Raises OSError if they cannot be read.

    A directory may belong to this user, root, or a group of this user. Blocks for as long as the file system does.
    """
    places = [root, root / LAYOUT, root / LAYOUT / "objects"]
    if root.parent.name == "namespaces":
        places = [root.parent.parent, root.parent, *places]
    return [doubt for place in places for doubt in _doubts(place)]


def _doubts(path: Path) -> list[Doubt]:
    found = path.stat()
    ours = {os.getegid(), *os.getgroups()}
    if found.st_uid not in (os.geteuid(), 0) and found.st_gid not in ours:
        who = f"it belongs to user {found.st_uid} and group {found.st_gid}, in which this user is not"
        return [Doubt(path, who, "chgrp it to a group of all who use the store, or point KCOORD_STORE elsewhere")]
    if found.st_mode & 0o002 and not found.st_mode & stat.S_ISVTX:
        return [Doubt(path, "everybody may rename what is in it", "chmod o-w (or +t, if everybody is to use it)")]
    if found.st_mode & 0o020 and found.st_gid not in ours and found.st_gid != 0:
        return [
            Doubt(
                path,
                f"group {found.st_gid}, in which this user is not, may rename what is in it",
                "chmod g-w, or chgrp",
            )
        ]
    return []
