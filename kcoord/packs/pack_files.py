"""The packs of profiles in a store, by name, and notes on a node's disk of those that it has had.

A pack is ``<store>/v2/packs/<profile>/<number>-<content>.<key id>.pack``, or without the key id if it is not signed
(`kcoord.packs.pack`). It is never changed. Its name has a number that grows with each pack of the profile, the beginning of its
index's SHA-256, and its signer. Of a profile's packs by one signer the newest, that with the highest number, counts; its writer
moves the others to the trash. A pack holds copies only: a node without one, or with a damaged one, looks each artifact up.

Jobs that use a pack touch it once a day, so its modification time is the day of its last use, and never its age.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from kcoord.artifacts.signing import OFF, Trust
from kcoord.errors import StoreError
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT, paths_of
from kcoord.files.private import make_own
from kcoord.packs.automatic import is_automatic, nearest
from kcoord.packs.recipe_files import times_of_profiles

LARGEST_PACK = 256 << 20  # bytes
SUFFIX = ".pack"
_CONTENT = 16  # digits, of a hash
_HIGHEST = 10**12 - 1
_HERE, _MOST_NOTED = "packs", 64  # a directory of the local directory, and its files
_NAME = re.compile(r"(\d{1,12})-[0-9a-f]{16}(?:\.([A-Za-z0-9._-]{1,64}))?\.pack")


def packs_directory(store: Path, profile: str) -> Path:
    return store / LAYOUT / "packs" / profile


def pack_name(number: int, content: str, signer: str) -> str:
    """The file name of the pack whose index has the SHA-256 `content`. `signer`: a key id, or empty."""
    return f"{number:08d}-{content[:_CONTENT]}{signer and f'.{signer}'}{SUFFIX}"


def signer_of(path: Path) -> str:
    """The key id that the file name states, not verified; empty for a pack without a signature."""
    match = _NAME.fullmatch(path.name)
    return (match and match[2]) or ""


def number_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match is not None else 0


def next_number(packs: Iterable[Path]) -> int:
    """The number of the pack that is written after `packs`, all of one profile."""
    return min(_HIGHEST, max(map(number_of, packs), default=0) + 1)


def packs_of(store: Path, profile: str) -> list[Path]:
    """The packs of `profile`, the newest first; none if there is none. Raises OSError."""
    found = [path for path in paths_of(packs_directory(store, profile), SUFFIX) if _NAME.fullmatch(path.name)]
    return sorted(found, key=lambda path: (number_of(path), path.name), reverse=True)


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


# On a node: a pack whose artifacts it has, or had, is not read again for nothing.


def was_here(store: Path, profile: str, trust: Trust, local_dir: Path) -> bool:
    """True if `note_here` noted the newest pack of `profile`, which is in use then. Raises nothing."""
    here = local_dir / _HERE
    with suppress(OSError, StoreError):
        path = newest_pack(store, profile, trust) if here.exists() else None
        if path is not None and (here / path.stem).exists():
            beneath.mark_used(path, store)
            return True
    return False


def note_here(local_dir: Path, name: str) -> None:
    """This node has, or had, the artifacts that its ranks need of the pack `name`. Raises nothing."""
    with suppress(OSError, StoreError):
        directory = local_dir / _HERE
        make_own(directory)
        (directory / name).touch()
        for old in sorted(directory.iterdir(), key=lambda path: -path.stat().st_mtime)[_MOST_NOTED:]:
            old.unlink()
