"""A store's root directory: how it is made, recognized and probed.

``kcoord-store.msgpack`` marks it, with its format and uuid; ``v2`` holds the rest. `kcoord.artifacts.store` has the artifacts.
"""

from __future__ import annotations

import os
import stat
import uuid
from contextlib import suppress
from pathlib import Path

import msgpack

from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT
from kcoord.files.faults import store_error, store_errors
from kcoord.files.link import publish_file
from kcoord.files.reading import read_plain
from kcoord.files.rename import refresh_names

FORMAT = 1
MARKER = "kcoord-store.msgpack"
NO_STORE = "there is no store here: make it once with 'kcoord store init', or look at KCOORD_STORE and its mount"
_LARGEST_MARKER = 64 << 10
_PROBE = 64 << 10  # bytes: a quota is not seen by a smaller file


class StoreRoot:
    """The directories of the store at `path`. Every method may block for as long as the file system does."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.objects = path / LAYOUT / "objects"
        self.staging = path / LAYOUT / "staging"
        self.quarantine = path / LAYOUT / "quarantine"

    def create(self) -> str:
        """Make the store if there is none, and return its uuid. Safe to run from many nodes at once. Raises `StoreError`.

        Of a store that is there, what may be written is asked for, and nothing is: each node of a job does this at its start.
        """
        with suppress(StoreError):
            uuid = self.uuid()
            if all(os.access(place, os.W_OK | os.X_OK) for place in (self.staging, self.objects)):
                return uuid
        with store_errors(self.path):
            for place in (self.staging.parent, self.staging, self.objects):
                place.mkdir(parents=place == self.staging.parent, exist_ok=True)
                beneath.check(place, self.path)
        # one of many creators wins, and no reader sees half a file
        publish_file(
            self.path / MARKER,
            self.path,
            self.staging,
            lambda file: file.write(_marker()),
            self._is_marked,
        )
        return self.uuid()

    def _is_marked(self) -> bool:
        refresh_names(self.path)
        return os.path.lexists(self.path / MARKER)

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

    def find(self) -> None:
        """Raises `StoreError` unless there is a store here, or this is a namespace's place in one. Makes nothing."""
        places = [self.path]
        if self.path.parent.name == "namespaces":
            places.append(self.path.parent.parent)
        with store_errors(self.path):
            for place in places:
                with suppress(FileNotFoundError, NotADirectoryError):
                    refresh_names(place)  # it may just have been made by another node
                    (place / MARKER).stat()
                    return
        raise _missing(self.path, passing=True)  # the job runs without one

    def check(self) -> None:
        """Publish a probe, and remove it. Raises `StoreError` if that fails.

        Unlike `create` it makes no store: where a mount has vanished there is another disk.
        """
        self.uuid()
        landed = self.objects / "probe"  # one name: killed processes leave one file at most
        self._remove(landed)
        # what is there is another node's, which probes at the same moment
        publish_file(landed, self.path, self.staging, lambda file: file.write(os.urandom(_PROBE)), lambda: True)
        self._remove(landed)

    def _remove(self, landed: Path) -> None:
        with store_errors(self.path), beneath.opened(landed.parent, self.path) as place, suppress(FileNotFoundError):
            os.unlink(landed.name, dir_fd=place)


def check_is_store(path: Path, *, or_new: bool = False) -> None:
    """Raises `StoreError` unless a store of our format is at `path`, or, with `or_new`, nothing. Makes nothing."""
    is_store = False
    with store_errors(path), suppress(NotADirectoryError):
        try:
            is_store = stat.S_ISREG((path / MARKER).stat().st_mode)
        except FileNotFoundError:
            if or_new:
                return
    if not is_store:
        raise _missing(path)
    StoreRoot(path).uuid()


def _missing(path: Path, *, passing: bool = False) -> StoreError:
    why = "it is a file: name a directory in KCOORD_STORE" if path.is_file() else NO_STORE
    return StoreError(f"{path}: {why}", why, passing=passing)


def _marker() -> bytes:
    return bytes(msgpack.packb({"format": FORMAT, "uuid": uuid.uuid4().hex}))
