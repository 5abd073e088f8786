"""The holdings of a store: one small file, ``<store>/v2/holdings``, that the last pass which counted left for agents' metrics.

One agent of all makes a pass, or `kcoord gc`; the other agents read the figures here. They are as old as the file, whose
modification time the file server sets. Not trusted: whoever can write to the store can forge them; they steer nothing.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

import msgpack

from kcoord.errors import ArtifactInvalid
from kcoord.files.atomic import LAYOUT, replace_file
from kcoord.files.faults import store_error
from kcoord.files.reading import read_plain
from kcoord.files.rename import refresh_names

_FORMAT = "kcoord-holdings-1"
_LARGEST = 1024  # bytes
_NAME = "holdings"


@dataclass(frozen=True)
class Holdings:
    """`size` in bytes, in whole blocks; `files` are files and directories; `at`: Unix seconds, by the file system's clock."""

    artifacts: int
    size: int
    files: int
    at: float


def note_holdings(store: Path, artifacts: int, size: int, files: int) -> None:
    """Raises OSError: on a full disk it is not noted."""
    content = msgpack.packb([_FORMAT, artifacts, size, files])
    replace_file(store / LAYOUT / _NAME, content, store / LAYOUT / "staging", store)


def read_holdings(store: Path) -> Holdings | None:
    """None: nobody has counted yet, or the file is not of this version, or damaged. Raises `StoreError`."""
    path = store / LAYOUT / _NAME
    try:
        try:
            content = read_plain(path, _LARGEST, afresh=True)
        except FileNotFoundError:
            refresh_names(path.parent)  # an NFS client remembers for a while that it was missing
            content = read_plain(path, _LARGEST, afresh=True)
        at = path.lstat().st_mtime
    except (FileNotFoundError, ArtifactInvalid):
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # NFS v3: it is being replaced
            return None
        raise store_error(error, path) from error
    try:
        version, *figures = msgpack.unpackb(content)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException):
        return None
    if version != _FORMAT or len(figures) != 3 or not all(type(n) is int and 0 <= n < 1 << 63 for n in figures):
        return None
    artifacts, size, files = figures
    return Holdings(artifacts, size, files, at)
