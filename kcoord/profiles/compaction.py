"""Compaction: merges a profile's many files into few, safe beside readers, writers and other compactions.

Each agent of each job may leave a part, and a file of requested artifacts: the sets differ where nodes run different stages, or a
job ended early. Once no agent writes to them any more, one file that holds all of them replaces them: it is on disk, durably,
before they move to the trash. A reader that sees both reads equal entries twice; one that misses a file lists again.

A part keeps the meaning of its signature: parts that one key has signed become one part with the same signature, made by an agent
that has this key; an agent without a key merges unsigned parts. So no signed part gains a recipe that its key did not vouch for,
no recipe loses its signature, and withdrawing a key withdraws all that it signed.
"""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from kcoord.artifacts.signing import OFF, PROFILE, Trust, split
from kcoord.errors import ArtifactInvalid
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT
from kcoord.files.faults import store_error
from kcoord.files.reading import read_plain
from kcoord.files.rename import sync_directory
from kcoord.files.shared_directory import written_at
from kcoord.files.sweep import sweep
from kcoord.files.trash import Trash
from kcoord.profiles.parts import PARTS, decode_part, save_part
from kcoord.profiles.profile_files import FileFormat, profiles_in
from kcoord.profiles.recipe import Known, Recipe, add
from kcoord.profiles.requested import (
    MOST_REQUESTED,
    REQUESTED,
    RequestedArtifact,
    read_named,
    requested_directory,
    requested_name,
    save_requested,
)

Merged = tuple[Path, list[Path]]  # a durable file, and the files whose content it holds

_ABOVE = 16  # files; so many cost a reader next to nothing
_SETTLED = 3600.0  # seconds; a younger file's agent may be about to replace it by a larger one
_NOT_OURS = (errno.ENOENT, errno.ESTALE, errno.EACCES, errno.EPERM)  # it vanishes right now, or is another user's
_MOST_BYTES = 64 << 20  # of one merged part's recipes, as many as an agent keeps in memory


def compact(store: Path, trust: Trust = OFF, most: int | None = None) -> int:
    """Merge the parts of each profile of `store`, at most `most` in all; returns how many were removed. Raises `StoreError`.

    Not guaranteed: that one part is left. Young or unreadable parts stay, parts whose signatures are not `trust`'s, and those for
    which a merged part has no room. Blocks for as long as the file system does.
    """
    return _compact(store, store / LAYOUT / "profiles", PARTS, partial(_merge_parts, trust=trust), most)


def compact_requested(store: Path, most: int | None = None) -> int:
    """The same for the files of requested artifacts. A reader finds the same artifacts as before, in the same order.

    Not guaranteed, besides: the order, where one file has no room for all, or one pass does not merge all.
    """
    return _compact(store, requested_directory(store, ""), REQUESTED, _merge_requested, most)


def _compact(
    store: Path, profiles: Path, files: FileFormat, merge: Callable[[Path, list[Path]], Merged | None], most: int | None
) -> int:
    """Raises `StoreError`."""
    trash = Trash(store / LAYOUT / "trash", store)
    place = trash.directory if os.access(trash.directory, os.F_OK) else store / LAYOUT
    if not os.access(place, os.W_OK | os.X_OK):
        return 0  # another user's: each pass would add a file, and remove none
    removed, left = 0, most
    for directory in [profiles / name for name in profiles_in(profiles)]:
        try:
            with suppress(OSError):  # left by a killed writer
                sweep(directory, store)
            paths = files.paths(directory)
            if len(paths) <= _ABOVE:
                continue
            now = beneath.touched(directory, store)
            settled = [path for path in paths if _age(path, now) > _SETTLED]
            random.shuffle(settled)  # the first ones may be those that are not ours to merge
            made = merge(directory, settled[:left])
            if made is not None:
                merged, held = made
                removed += sum(trash.take(path) is not None for path in held if path != merged)
            left = most - removed if most is not None else None
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise store_error(error, directory) from error
    return removed


def _merge_parts(directory: Path, paths: list[Path], trust: Trust) -> Merged | None:
    """Merge the parts of one signer, which is the most frequent one. Raises OSError, `StoreError`."""
    if trust.keys:
        ours = trust.signers
        if not ours:
            return None  # the merged part would have no signature
        signers = Counter(_signer(path) for path in paths)
        trust = trust.only(max(ours, key=lambda key_id: signers[key_id]))
    found: dict[str, Recipe] = {}
    known = Known()
    size = 0
    held = []
    for path in paths:
        recipes = _mergeable(path, trust, known)
        fresh = {r.digest: r.size for r in recipes if r.digest not in found}
        if recipes and size + sum(fresh.values()) <= _MOST_BYTES:
            for recipe in recipes:
                add(found, recipe)
            size += sum(fresh.values())
            if all(recipe.digest in found for recipe in recipes):  # a profile has a bound on its recipes
                held.append(path)
    if len(held) < 2:
        return None
    return save_part(directory, found.values(), trust=trust), held


def _merge_requested(directory: Path, paths: list[Path]) -> Merged | None:
    """Merge files of requested artifacts. None may be lost, for they may be pinned: a file that does not fit stays.

    The merged file takes the time of the newest file that it holds, so that younger ones still come first. Raises OSError,
    `StoreError`.
    """
    found: dict[RequestedArtifact, None] = {}
    held: dict[Path, float] = {}
    for path, at in sorted(((path, written_at(path)) for path in paths), key=lambda file: -file[1]):
        artifacts = read_named(path)
        fresh = sum(artifact not in found for artifact in artifacts)
        # a file that is half full stays, so that any two others find room
        if artifacts and len(artifacts) <= MOST_REQUESTED // 2 and len(found) + fresh <= MOST_REQUESTED:
            found.update(dict.fromkeys(artifacts))
            held[path] = at
    if len(held) < 2:
        return None
    newest = max(held.values())
    merged = directory / requested_name(found)
    if written_at(merged) >= newest and read_named(merged):
        sync_directory(directory)  # an existing file holds all the others; it may be a young job's
    else:
        save_requested(directory, found, at=newest)
    return merged, list(held)


def _signer(path: Path) -> str:
    """The key that a part names as its signer, unverified; empty if there is none."""
    try:
        _, signature = split(read_plain(path, PARTS.largest))
    except (ArtifactInvalid, OSError):  # `_mergeable` meets it too
        return ""
    return signature.key_id if signature is not None else ""


def _mergeable(path: Path, trust: Trust, known: Known) -> list[Recipe]:
    """The recipes of a part that we may merge; empty for another one, whose readers report its fault."""
    try:
        sealed = read_plain(path, PARTS.largest)
        content, signature = split(sealed)
        if trust.keys:
            if signature is None or not trust.verifies(PROFILE, sealed):
                return []
        elif signature is not None or trust.required:
            return []
        return decode_part(content, known)
    except (ArtifactInvalid, ValueError):
        return []
    except OSError as error:
        if error.errno in _NOT_OURS:  # the other parts are not affected
            return []
        raise


def _age(path: Path, now: float) -> float:
    try:
        return now - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0  # its writer has just replaced it by a larger one
