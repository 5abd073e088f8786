"""The trash: what is to be removed lies there for a while, under another name, before it is.

Taking something away is one `rename`, in the same file system: whoever has its files open goes on reading them, whoever asks for
them by name finds the whole of it or nothing. It is deleted when it has lain there for the *grace* period, by the file system's
own clock. Whoever is killed in between leaves something whole, or something in the trash, which the next one deletes.

Not guaranteed: that a reader of NFS v3 which has had a file open for longer than the grace period can go on; it gets ESTALE,
which is a miss.
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
        """Move `path` here; where it lies now. None: it is gone already, or it is not ours to move.

        Raises OSError if the directory cannot be made, or the disk takes no renames.
        """
        there = self.directory / f"{path.name}-{uuid.uuid4().hex[:12]}"
        try:
            path.rename(there)
        except FileNotFoundError:
            with suppress(FileExistsError):
                self.directory.mkdir()  # never its parents: where a mount has vanished there is another disk
            try:
                path.rename(there)
            except FileNotFoundError:
                return None  # another was faster; or the rename was answered twice, and it is done
            except PermissionError:
                return None
        except PermissionError:
            return None  # another user's
        with suppress(OSError):  # most file systems have done it in the rename
            os.utime(there, follow_symlinks=False)  # its time here begins
        return there

    def put_back(self, there: Path, path: Path) -> bool:
        """Undo `take`. False: something else is at `path` by now, or it is gone from here."""
        try:
            there.rename(path)
        except OSError:
            return False
        return True

    def empty(self, grace: float = GRACE) -> int:
        """Delete what has lain here for longer than `grace` seconds, in bounded work; returns how much. No link is followed."""
        deleted = 0
        try:
            if not stat.S_ISDIR(self.directory.lstat().st_mode):
                return 0
            now = touched(self.directory)
            with os.scandir(self.directory) as entries:
                for entry in entries:
                    with suppress(OSError):  # another was faster
                        found = entry.stat(follow_symlinks=False)
                        if now - found.st_ctime > grace:
                            deleted += _delete(Path(entry.path), found.st_mode)
                    if deleted >= _MOST_DELETED:
                        break
        except FileNotFoundError:
            pass  # nothing was ever taken away
        return deleted


def _delete(path: Path, mode: int) -> bool:
    if stat.S_ISDIR(mode):
        shutil.rmtree(path, ignore_errors=True)  # what an NFS client holds open (.nfsXXXX) goes next time
        return not path.exists()
    path.unlink()
    return True
