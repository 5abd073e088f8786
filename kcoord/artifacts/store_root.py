"""A store's root directory: made once, told from a directory that is none, and tried.

``kcoord-store.msgpack`` marks it, with its format and uuid; ``v1`` holds the rest. `kcoord.artifacts.store` says what an artifact
in it is.
"""

from __future__ import annotations

import os
import shutil
import stat
import uuid
from pathlib import Path

import msgpack

from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files.faults import (
    store_error,
)
from kcoord.files.naming import (
    staging_name,
)
from kcoord.files.reading import read_plain
from kcoord.files.rename import (
    write_files,
)

FORMAT = 1
MARKER = "kcoord-store.msgpack"
_LARGEST_MARKER = 64 << 10
_MOST_LEFT = 1000


class StoreRoot:
    """Where the parts of the store at `path` are. Every method may block for as long as the file system does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.objects = path / "v1" / "objects"
        self.staging = path / "v1" / "staging"
        self.quarantine = path / "v1" / "quarantine"
        self._left: set[Path] = set()  # what we staged, and a fault kept us from removing

    def create(self) -> str:
        """Make the store if there is none, and return its uuid. Safe to run from many nodes at once. Raises `StoreError`."""
        try:
            self.staging.mkdir(parents=True, exist_ok=True)
            self.objects.mkdir(exist_ok=True)
            fresh = self.staging / f"{staging_name()}.marker"
            try:
                write_files(self.staging, {fresh.name: _marker()}, durable=True)
                os.link(fresh, self.path / MARKER)  # of many creators one wins, and nobody sees half a file
            except FileExistsError:
                pass
            finally:
                self.discard(fresh)
        except OSError as error:
            raise store_error(error, self.path) from error
        return self.uuid()

    def uuid(self) -> str:
        """Raises `StoreError` if there is no store, or none of this format."""
        try:
            stated = msgpack.unpackb(read_plain(self.path / MARKER, _LARGEST_MARKER))
        except OSError as error:
            raise store_error(error, self.path) from error
        except (ArtifactInvalid, ValueError, msgpack.exceptions.UnpackException) as error:
            raise StoreError(
                f"{self.path}: its {MARKER} cannot be read ({error}): point KCOORD_STORE elsewhere"
            ) from error
        if not isinstance(stated, dict) or stated.get("format") != FORMAT or not isinstance(stated.get("uuid"), str):
            raise StoreError(
                f"{self.path}: its format is not {FORMAT}: use the kcoord that made it, or a new directory"
            )
        return str(stated["uuid"])

    def check(self, size: int) -> None:
        """Return if an artifact of `size` bytes could be published now. Raises `StoreError`.

        Unlike `create` it makes no store: where a mount has vanished there is another disk.
        """
        self.uuid()
        fresh = self.staging / f"{staging_name()}.probe"
        landed = self.objects / "probe"  # one name: whoever is killed here leaves one file at most
        try:
            try:
                fresh.mkdir()  # all that publishing does
                write_files(fresh, {landed.name: os.urandom(size)}, durable=True)
                (fresh / landed.name).rename(landed)
                landed.unlink(missing_ok=True)
            finally:
                self.discard(fresh)
            for left in list(self._left):
                self._left.discard(left)
                self.discard(left)
        except FileNotFoundError as error:
            if self.staging.is_dir() and self.objects.is_dir():
                return  # another node's probe went the same way at once, or the rename was answered twice
            raise store_error(error, self.path) from error
        except OSError as error:
            raise store_error(error, self.path) from error

    def discard(self, staged: Path) -> None:
        """Remove what we staged, now or when the store is well again: nobody else may while we live."""
        try:
            staged.unlink() if not staged.is_dir() else shutil.rmtree(staged)
        except FileNotFoundError:
            return
        except OSError:
            if len(self._left) < _MOST_LEFT:
                self._left.add(staged)


def check_is_store(path: Path, *, or_new: bool = False) -> None:
    """Return if there is a store of our format at `path`; with `or_new` also where there is nothing, and one may be made.

    Nothing is made. Raises `StoreError`, also if nobody can tell.
    """
    try:
        is_store = stat.S_ISREG((path / MARKER).stat().st_mode)
    except FileNotFoundError:
        if or_new:
            return
        is_store = False
    except NotADirectoryError:
        is_store = False
    except OSError as error:
        raise store_error(error, path) from error
    if not is_store:
        raise StoreError(f"{path}: there is no store here: set KCOORD_STORE to one, or look at its mount")
    StoreRoot(path).uuid()


def _marker() -> bytes:
    return bytes(msgpack.packb({"format": FORMAT, "uuid": uuid.uuid4().hex}))
