"""Notes on a node's disk of the packs whose artifacts it has, or had: such a pack is not read again for nothing."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.files.private import make_own
from kcoord.profiles.packs import newest_pack

_HERE, _MOST_NOTED = "packs", 64  # a directory of the local directory, and its files


def was_here(store: Store, profile: str, local_dir: Path) -> bool:
    """True if `note_here` noted the newest pack of `profile`. Raises nothing."""
    here = local_dir / _HERE
    with suppress(OSError, StoreError):
        path = newest_pack(store.root, profile, store.trust) if here.exists() else None
        return path is not None and (here / path.stem).exists()
    return False


def note_here(local_dir: Path, name: str) -> None:
    """This node has, or had, the artifacts that its ranks need of the pack `name`. Raises nothing."""
    with suppress(OSError, StoreError):
        directory = local_dir / _HERE
        make_own(directory)
        (directory / name).touch()
        for old in sorted(directory.iterdir(), key=lambda path: -path.stat().st_mtime)[_MOST_NOTED:]:
            old.unlink()
