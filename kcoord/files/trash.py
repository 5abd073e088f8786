"""The trash: a removed directory stays there under another name for a *grace* period before it is deleted.

A removal is one `rename` in the same file system: a reader with open files goes on reading, and a lookup by name finds all
files or none. After the grace period, by the file system's own clock, the files are deleted. A process that is killed in between
leaves a directory whole, or in the trash, which the next pass deletes.

Not guaranteed: that a reader on NFS v3 with a file open for longer than the grace period can go on; it gets ESTALE, which is
a miss.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from kcoord.files.sweep import touched

GRACE = 900.0  # seconds; one fetch from the store is given up after 60
_MOST_DELETED = 20_000


class Trash:
    """One directory of trash. Safe in many processes at once; raises OSError as the file system does."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def take(self, path: Path) -> Path | None:
        """Move `path` here; returns its new path. None if it is gone already, or this user may not move it.

        Raises OSError if the directory cannot be made, or the disk takes no renames.
        """
        trashed = self.directory / f"{path.name}-{uuid.uuid4().hex[:12]}"
        try:
            path.rename(trashed)
        except FileNotFoundError:
            with suppress(FileExistsError):
                self.directory.mkdir()  # never its parents: where a mount has vanished there is another disk
            try:
                path.rename(trashed)
            except FileNotFoundError:
                return None  # moved by another process; or NFS sent our rename twice
            except PermissionError:
                return None
        except PermissionError:
            return None  # another user's
        with suppress(OSError):  # the grace period begins: most file systems set the ctime in the rename
            os.utime(trashed, follow_symlinks=False)
        return trashed

    def put_back(self, trashed: Path, path: Path) -> bool:
        """Undo `take`. False if `path` exists again, or `trashed` is gone."""
        try:
            trashed.rename(path)
        except OSError:
            return False
        return True

    def empty(self, grace: float = GRACE) -> int:
        """Delete entries older than `grace` seconds, in bounded work; returns their number. No link is followed."""
        deleted = 0
        try:
            if not stat.S_ISDIR(self.directory.lstat().st_mode):
                return 0
            now = touched(self.directory)
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    with suppress(OSError):  # deleted by another process
                        found = entry.stat(follow_symlinks=False)
                        if now - found.st_ctime > grace:
                            deleted += _delete(Path(entry.path), found.st_mode)
                    if deleted >= _MOST_DELETED:
                        break
        except FileNotFoundError:
            pass  # nothing was ever removed
        return deleted


def _delete(path: Path, mode: int) -> bool:
    if stat.S_ISDIR(mode):
        shutil.rmtree(path, ignore_errors=True)  # files that an NFS client holds open (.nfsXXXX) go next time
        return not path.exists()
    path.unlink()
    return True
