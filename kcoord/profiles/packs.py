"""Packs: the artifacts that a profile's jobs asked for, in one file of the store: one sequential read for each node.

A pack is ``<store>/v1/packs/<profile>/<content>.pack``, a bundle (`kcoord.transfer.pack` reads and writes it), never changed, and
named by the SHA-256 of its signed index, which states every other byte. The newest one of a profile counts; its writer moves the
others to the trash. It holds copies only: whoever has no pack, or a damaged one, looks each artifact up.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kcoord.files import beneath
from kcoord.files.shared_directory import paths_of
from kcoord.profiles.automatic import is_automatic, nearest
from kcoord.profiles.profile_files import times_of_profiles

LARGEST_PACK = 256 << 20  # bytes
SUFFIX = ".pack"
_NAME = re.compile(r"[0-9a-f]{64}\.pack")


def packs_directory(store: Path, profile: str) -> Path:
    return store / "v1" / "packs" / profile


def packs_of(store: Path, profile: str) -> list[Path]:
    """The packs of `profile`, the newest first; none if there is none. Raises OSError."""
    found = paths_of(packs_directory(store, profile), SUFFIX)
    return sorted(found, key=_written_at, reverse=True) if len(found) > 1 else found


def newest_pack(store: Path, profile: str) -> Path | None:
    """The pack to read for `profile`: for an automatic profile without one, the nearest's. Raises OSError, `StoreError`."""
    found = packs_of(store, profile)
    if not found and is_automatic(profile):
        other = nearest(profile, times_of_profiles(packs_directory(store, "")))
        found = packs_of(store, other) if other is not None else []
    return found[0] if found else None


def all_packs(store: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Every pack with its status, one profile after the other; no link is followed. Raises OSError."""
    root = packs_directory(store, "")
    with suppress(FileNotFoundError, NotADirectoryError):
        for profile, _ in list(beneath.listed(root, store)):
            with suppress(FileNotFoundError, NotADirectoryError):
                for name, found in list(beneath.listed(root / profile, store)):
                    if _NAME.fullmatch(name) and stat.S_ISREG(found.st_mode):
                        yield root / profile / name, found


def _written_at(path: Path) -> tuple[float, str]:
    """Seconds of the file system's clock; and the name, for two of one moment."""
    try:
        return path.stat().st_mtime, path.name
    except OSError:
        return 0.0, path.name  # its successor's writer has just moved it
