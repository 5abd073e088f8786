"""Directories that only this user may write to."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from kcoord.errors import StoreError
from kcoord.files.faults import store_errors


def make_private(directory: Path, remedy: str = "set KCOORD_LOCAL_DIR to a directory of your own") -> None:
    """Create `directory` for this user alone. Raises `StoreError` if another owns it, or all may write to it."""
    with store_errors(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.stat()
    if found.st_uid != os.getuid():
        raise StoreError(f"{directory}: it belongs to user {found.st_uid}: {remedy}")
    if found.st_mode & stat.S_IWOTH:
        remedy = remedy if found.st_mode & stat.S_ISVTX else f"chmod o-w, or {remedy}"
        raise StoreError(f"{directory}: everybody may write to it: {remedy}")
