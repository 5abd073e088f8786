"""Owners and modes of an artifact's files: they are loaded if they are this user's or root's, and nobody else may write to them.

The directories above the artifact's own are judged by `kcoord.files.private.check_tier`.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path, PurePosixPath

from kcoord.artifacts.manifest import MANIFEST_NAME, Manifest
from kcoord.errors import ArtifactInvalid
from kcoord.ownership import finding_of


def check_directory(path: str) -> bool:
    """True if nobody else can enter the directory at `path`, so that modes below it do not count.

    Raises `ArtifactInvalid` if it is a link, another user's, or others may write to it; OSError.
    """
    found = os.lstat(path)
    if stat.S_ISLNK(found.st_mode):
        raise ArtifactInvalid(f"{path} is a symbolic link")
    check_ours(path, found)
    return not found.st_mode & 0o011


def check_folders(root: str, name: str, *, sheltered: bool) -> None:
    """As `check_directory`, for those between `root` and the file `name` below it. Most files are in none, and cost nothing."""
    end = name.find("/")
    while end != -1:
        path = f"{root}/{name[:end]}"
        found = os.lstat(path)
        if stat.S_ISLNK(found.st_mode):
            raise ArtifactInvalid(f"{path} is a symbolic link")
        check_ours(path, found, sheltered=sheltered)
        end = name.find("/", end + 1)


def check_ours(path: str, found: os.stat_result, *, sheltered: bool = False) -> None:
    """Raises `ArtifactInvalid` if others may change what is at `path`: see `finding_of`."""
    finding = finding_of(path, found, sheltered=sheltered)
    if finding is not None:
        raise ArtifactInvalid(f"{path}: {finding}: it is not used")


def close_to_writers(staging: Path, manifest: Manifest) -> None:
    """Take the right to write to the artifact's files and folders from everybody else, whatever the umask. Raises OSError."""
    names = {MANIFEST_NAME, *(file.name for file in manifest.files)}
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents}
    for path in (f"{staging}/{name}" for name in names | folders):
        mode = os.lstat(path).st_mode
        if mode & 0o022:
            os.chmod(path, stat.S_IMODE(mode) & ~0o022)  # noqa: PTH101 - plain paths: a publish has many
