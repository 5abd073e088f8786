"""Packs: the artifacts that a profile's jobs asked for, in one file of the store: one sequential read for each node.

A pack is ``<store>/v2/packs/<profile>/<content>.<key id>.pack``, or ``<content>.pack`` without a signature: a bundle
(`kcoord.transfer.pack` reads and writes it), never changed. Its name has the SHA-256 of its signed index, which states every
other byte, and its signer. Of a profile's packs by one signer the newest counts; its writer moves the others to the trash. A pack
holds copies only: a node without one, or with a damaged one, looks each artifact up.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from kcoord.artifacts.signing import OFF, Trust
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT
from kcoord.files.shared_directory import paths_of, written_at
from kcoord.profiles.automatic import is_automatic, nearest
from kcoord.profiles.profile_files import times_of_profiles

LARGEST_PACK = 256 << 20  # bytes
SUFFIX = ".pack"
_CONTENT = 64  # digits
_NAME = re.compile(r"[0-9a-f]{64}(\.[A-Za-z0-9._-]{1,64})?\.pack")


def packs_directory(store: Path, profile: str) -> Path:
    return store / LAYOUT / "packs" / profile


def pack_name(content: str, signer: str) -> str:
    """The file name of the pack whose index has the SHA-256 `content`. `signer`: a key id, or empty."""
    return f"{content}.{signer}{SUFFIX}" if signer else content + SUFFIX


def signer_of(path: Path) -> str:
    """The key id that the file name states, not verified; empty for a pack without a signature."""
    return path.stem[_CONTENT + 1 :]


def packs_of(store: Path, profile: str) -> list[Path]:
    """The packs of `profile`, the newest first; none if there is none. Raises OSError."""
    found = paths_of(packs_directory(store, profile), SUFFIX)
    return sorted(found, key=lambda path: (written_at(path), path.name), reverse=True) if len(found) > 1 else found


def usable_packs(store: Path, profile: str, trust: Trust) -> list[Path]:
    """The packs of `profile` by the keys of `trust`, the newest first; then the others, unless signatures are required.

    Raises OSError.
    """
    found = packs_of(store, profile)
    ours = [path for path in found if signer_of(path) in trust.keys]
    return ours if trust.required else [*ours, *(path for path in found if path not in ours)]


def newest_pack(store: Path, profile: str, trust: Trust = OFF) -> Path | None:
    """The pack to read for `profile`: the first of its `usable_packs`; for an automatic profile without one, the nearest's.

    Raises OSError, `StoreError`.
    """
    found = usable_packs(store, profile, trust)
    if not found and is_automatic(profile):
        others = times_of_profiles(packs_directory(store, ""))
        while not found and (other := nearest(profile, others)) is not None:
            del others[other]
            found = usable_packs(store, other, trust)
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
