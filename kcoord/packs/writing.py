"""Writing the pack of a profile: what its jobs use now is added to what the pack before lists."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace

from kcoord.artifacts.object import StoredObject
from kcoord.artifacts.signing import MANIFEST, VERIFIES_ONLY
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT, staging_name
from kcoord.files.faults import store_error
from kcoord.files.rename import sync_directory
from kcoord.files.trash import Trash
from kcoord.packs.automatic import is_automatic
from kcoord.packs.index import MOST_LISTED, Index, PackInvalid, Use
from kcoord.packs.pack import LARGEST_INDEX, Pack, look_at_pack, write
from kcoord.packs.pack_files import LARGEST_PACK, next_number, pack_name, packs_directory, packs_of, signer_of
from kcoord.packs.recipe_files import forget_superfluous

LARGEST_PACKED = 8 << 20  # bytes of one artifact; a larger one is a long read in any case
ROOM = LARGEST_PACK - LARGEST_INDEX - (1 << 20)  # bytes of all objects of a pack
USED_WITHIN = 10  # days; a job may run once a week
_CHUNK = 1 << 20  # bytes: what an NFS client writes at once


def own_pack(store: Store, profile: str) -> Pack | None:
    """The newest pack of just this profile by this process' signer; close it. None: there is none. Raises `PackInvalid`, and
    `StoreError` if the store fails.
    """
    for _ in range(2):  # it may be replaced between its listing and its opening
        try:
            found = [p for p in packs_of(store.root, profile) if signer_of(p) == store.trust.signer]
        except OSError as error:
            raise store_error(error, store.root) from error
        if not found:
            return None
        try:
            return look_at_pack(store, found[0])
        except PackInvalid:
            if found[0].exists():
                raise
    return None


def added(uses: Iterable[Use], earlier: Pack | None, *, since: int, loaded: Collection[str] = ()) -> list[Use]:
    """`uses`, and what else `earlier` lists, if known keys vouch for it and it was used at day `since` or later, the last used
    first.

    `loaded`: the first 16 digits of the digests of artifacts that were used as recently as `uses`.
    """
    found = {use.digest: use for use in uses}
    today = max((use.day for use in found.values()), default=0)
    others = [
        replace(use, day=today) if use.digest[:16] in loaded else use
        for use in (earlier.index.uses if earlier is not None and earlier.vouched else ())
        if use.digest not in found
    ]
    others = [use for use in others if use.day >= since]
    return [*found.values(), *sorted(others, key=lambda use: (-use.day, use.digest))][:MOST_LISTED]


def write_pack(
    store: Store, profile: str, uses: Iterable[Use], *, largest: int = LARGEST_PACKED, room: int = ROOM
) -> Index:
    """Write a pack that lists `uses`, and move the profile's older packs of the same signer to the trash.

    It has the objects of those that are there, verify and have at most `largest` bytes, the first ones first, as long as there is
    `room` (bytes). It is signed if the store's `trust` has a key; then it has only objects that known keys have signed. Of
    automatic profiles the oldest packs beyond a hundred are removed. Raises `StoreError`.
    """
    if not store.trust.publishes:
        raise StoreError(f"{store.root}: {VERIFIES_ONLY}", VERIFIES_ONLY)
    trust = replace(store.trust)  # its keys may be exchanged meanwhile
    directory = packs_directory(store.root, profile)
    staged = store.root / LAYOUT / "staging" / f"{staging_name()}.part"
    try:
        beneath.check(staged.parent, store.root)
        with staged.open("wb", buffering=_CHUNK) as file:
            index = write(file, trust, _fitting(store, uses, largest, room), {})
            file.flush()
            os.fsync(file.fileno())
        for missing in (directory.parent, directory):
            with suppress(FileExistsError):
                beneath.mkdir(missing, store.root)
        number = next_number(packs_of(store.root, profile))
        path = directory / pack_name(number, index.digest, trust.signer)
        beneath.rename(staged, path, store.root)
        sync_directory(directory)
        ours = [other for other in packs_of(store.root, profile) if signer_of(other) == trust.signer]
        # none that is newer: of several writers at once one pack stays
        for older in list(itertools.dropwhile(lambda other: other != path, ours))[1:]:
            Trash(store.root / LAYOUT / "trash", store.root).take(older)
        if is_automatic(profile):
            forget_superfluous(directory.parent)
    except OSError as error:
        raise store_error(error, directory) from error
    finally:
        with suppress(OSError):
            beneath.unlink(staged, store.root)
    return index


def _fitting(store: Store, uses: Iterable[Use], largest: int, room: int) -> Iterator[tuple[Use, StoredObject | None]]:
    """Each use, with its object as long as there is room for it."""
    for use in {use.digest: use for use in uses}.values():
        found = _packable(store, use.digest, largest) if room > 0 else None
        if found is not None:
            room -= found.size
        yield use, found if room >= 0 else None


def _packable(store: Store, digest: str, largest: int) -> StoredObject | None:
    """None: it is missing, does not verify, is too large, or nobody vouches for it where others are vouched for."""
    try:
        found = store.object(digest, largest)
    except ArtifactInvalid:
        return None
    vouched = not store.trust.keys or (found is not None and store.trust.verifies(MANIFEST, found.encoded))
    return found if vouched and found is not None and found.size <= largest else None
