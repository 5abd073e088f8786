"""The trash: a removed directory stays there under another name for a *grace* period before it is deleted.

A removal is one `rename` in the same file system: a reader with open files goes on reading, and a lookup by name finds all
files or none. After the grace period, by the file system's own clock, the files are deleted. A process that is killed in between
leaves a directory whole, or in the trash, which the next pass deletes.

Not guaranteed: that a reader on NFS v3 with a file open for longer than the grace period can go on; it gets ESTALE, which is
a miss.
"""

from __future__ import annotations

import uuid
from contextlib import suppress
from pathlib import Path

from kcoord.files import beneath

GRACE = 900.0  # seconds; one fetch from the store is given up after 60
_MOST_DELETED = 20_000


class Trash:
    """One directory of trash. Safe in many processes at once; raises OSError as the file system does.

    `root`: see `kcoord.files.beneath`; it lies below it, and so does what it takes.
    """

    def __init__(self, directory: Path, root: Path | None = None) -> None:
        self.directory, self._root = directory, root

    def take(self, path: Path) -> Path | None:
        """Move `path` here; returns its new path. None if it is gone already, or this user may not move it.

        Raises OSError if the directory cannot be made, or the disk takes no renames.
        """
        trashed = self.directory / f"{path.name}-{uuid.uuid4().hex[:12]}"
        try:
            beneath.rename(path, trashed, self._root)
        except FileNotFoundError:
            with suppress(FileExistsError):
                beneath.mkdir(self.directory, self._root)
            try:
                beneath.rename(path, trashed, self._root)
            except FileNotFoundError:
                return None  # moved by another process; or NFS sent our rename twice
            except PermissionError:
                return None
        except PermissionError:
            return None  # another user's
        with suppress(OSError):  # the grace period begins: most file systems set the ctime in the rename
            beneath.touch(trashed, self._root)
        return trashed

    def put_back(self, trashed: Path, path: Path) -> bool:
        """Undo `take` of a directory. False if `path` exists again, or `trashed` is gone."""
        try:
            beneath.rename(trashed, path, self._root)
        except OSError:
            return False
        return True

    def empty(self, grace: float = GRACE) -> int:
        """Delete entries older than `grace` seconds, in bounded work; returns their number. No link is followed."""
        deleted, root = 0, self._root or self.directory.parent
        try:
            now = beneath.touched(self.directory, root)
            for name, found in beneath.listed(self.directory, root):
                if now - found.st_ctime > grace:
                    deleted += beneath.remove(self.directory / name, root)
                if deleted >= _MOST_DELETED:
                    break
        except (FileNotFoundError, NotADirectoryError):
            pass  # nothing was ever removed; or there is a link, whose maker would choose where we remove
        return deleted
