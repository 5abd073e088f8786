"""Pins: profiles whose artifacts are never removed from the store, nor from nodes.

A pin is the file ``<store>/v2/pins/<profile>.pin``. It keeps the profile's packs and all that their indexes list; a writer of
the next pack drops nothing of a pinned profile. Fails closed: while the pins, or the pack of one, cannot be read, nothing is
removed.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.errors import StoreError
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT, replace_file
from kcoord.files.faults import store_errors
from kcoord.packs.index import PackInvalid
from kcoord.packs.pack import look_at_pack
from kcoord.packs.pack_files import all_packs, packs_directory, packs_of, signer_of
from kcoord.settings import is_profile_name, profile_name

_CONTENT = b"kcoord-pin-2\n"
_MOST_PINS = 10_000
_MOST_KEPT = 4_000_000  # artifacts of all packs, which anybody may have written
_ATTEMPTS = 5
_SUFFIX = ".pin"


@dataclass
class Kept:
    """Digests of artifacts, their places in the local tier, and the directories of packs below ``v2``."""

    digests: set[str] = field(default_factory=set)
    places: set[str] = field(default_factory=set)
    packs: set[str] = field(default_factory=set)

    @property
    def names(self) -> set[str]:
        """Names of everything that stays in the store."""
        return self.digests | self.packs


def pin(store: Path, profile: str) -> None:
    """Raises `StoreError`."""
    path = _path(store, profile)
    with store_errors(path.parent):
        with suppress(FileExistsError):
            path.parent.mkdir()
        replace_file(path, _CONTENT, store / LAYOUT / "staging", store, durable=True)


def unpin(store: Path, profile: str) -> bool:
    """False: it was not pinned. Raises `StoreError`."""
    path = _path(store, profile)
    with store_errors(path), suppress(FileNotFoundError):
        beneath.unlink(path, store)
        return True
    return False


def is_pinned(store: Path, profile: str) -> bool:
    """Raises `StoreError`."""
    return profile in pinned_profiles(store)


def pinned_profiles(store: Path) -> list[str]:
    """Sorted. Raises `StoreError`."""
    directory = store / LAYOUT / "pins"
    names: list[str] = []
    with store_errors(directory), suppress(FileNotFoundError):
        names = [path.name for path in directory.iterdir() if path.suffix == _SUFFIX]
    if len(names) > _MOST_PINS:
        raise StoreError(f"{directory}: {len(names)} pins are too many: unpin some")
    return sorted(filter(is_profile_name, (name.removesuffix(_SUFFIX) for name in names)))


def kept_by_pins(store: Path, trust: Trust) -> Kept:
    """All that pins keep now.

    Raises `StoreError`, also where there is no store: its mount may have vanished, and its pins with it. Then nobody may remove
    anything.
    """
    check_is_store(store)
    found = Kept()
    for profile in pinned_profiles(store):
        add_kept(found, store, profile, trust)
    return found


def add_kept(found: Kept, store: Path, profile: str, trust: Trust) -> None:
    """Add all that a pin of `profile` keeps. Raises `StoreError`, also for a pack that cannot be read, but none that `trust`
    refuses.
    """
    opened = Store(store, trust)
    found.packs.add(packs_directory(store, profile).relative_to(store / LAYOUT).as_posix())
    with store_errors(store):
        for _ in range(_ATTEMPTS):
            paths = [path for path in packs_of(store, profile) if not trust.required or signer_of(path) in trust.keys]
            try:
                for path in paths:
                    with look_at_pack(opened, path) as pack:
                        found.digests |= {use.digest for use in pack.index.uses}
                        found.places |= {use.place for use in pack.index.uses if use.place}
            except PackInvalid as error:
                if path.exists():
                    raise StoreError(f"{error}; profile {profile} is pinned: remove that file, or unpin it") from error
                continue  # it was replaced in this moment
            if len(found.digests) > _MOST_KEPT:
                raise StoreError(f"{store}: its pins hold more than {_MOST_KEPT:,} artifacts: unpin some")
            return
    raise StoreError(f"{store}: the packs of {profile} change all the time: try again later")


def uses_by_packs(store: Path, trust: Trust) -> dict[str, float]:
    """The last uses of artifacts that packs list, in seconds of the file system's clock, by digest. Raises OSError.

    A pack that cannot be read, or that `trust` refuses, tells none. A forged one keeps artifacts, and removes none.
    """
    found: dict[str, float] = {}
    opened = Store(store, trust)
    for path, status in all_packs(store):
        with suppress(PackInvalid), look_at_pack(opened, path) as pack:
            for use in pack.index.uses:
                if len(found) < _MOST_KEPT or use.digest in found:
                    found[use.digest] = max(status.st_mtime, found.get(use.digest, 0.0))
    return found


def _path(store: Path, profile: str) -> Path:
    return store / LAYOUT / "pins" / f"{profile_name(profile)}{_SUFFIX}"
