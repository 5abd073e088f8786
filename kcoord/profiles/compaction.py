"""Making few files of a profile's many, safe beside its readers and writers, and beside others that do the same.

Each agent of each job may leave a part, and a file of needs: the sets differ, where nodes run different stages, or a job was
ended early. Once nobody writes to them any more, one file that holds all of them takes their place: it is there, durably, before
they go, and they go by way of the trash. A reader that sees both has equal things twice; one that misses a file looks again.

Parts' signatures keep their meaning: what one key has signed becomes one part that the same key signs, by whoever has that key;
whoever has none merges what is not signed. So a recipe that nobody vouched for is in no signed part, none that was loses its
signature, and what a key has signed goes when that key is taken away.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from kcoord.artifacts.signing import OFF, PROFILE, Trust, split
from kcoord.errors import ArtifactInvalid
from kcoord.files.faults import (
    store_error,
)
from kcoord.files.reading import read_plain
from kcoord.files.rename import (
    sync_directory,
)
from kcoord.files.sweep import sweep, touched
from kcoord.files.trash import Trash
from kcoord.profiles.parts import LARGEST_PART, decode_part, part_paths, save_part
from kcoord.profiles.recipe import Recipe, add
from kcoord.profiles.requested import (
    MOST_NEEDS,
    Need,
    named_needs,
    need_paths,
    needs_directory,
    needs_name,
    save_needs,
    written,
)
from kcoord.settings import profile_name

Merged = tuple[Path, list[Path]]  # a file that is there, durably, and the files of which it holds all

_ABOVE = 16  # files; that many cost a reader nothing to speak of
_SETTLED = 3600.0  # seconds; a younger file's agent is about to put a larger one in its place
_NOT_OURS = (errno.ENOENT, errno.ESTALE, errno.EACCES, errno.EPERM)  # it goes this very moment, or is another user's
_MOST_BYTES = 64 << 20  # of one merged part's recipes, as an agent has them in memory


def compact(store: Path, trust: Trust = OFF, most: int | None = None) -> int:
    """Merge the parts of each profile of `store`, `most` at most of all of them; returns how many went. Raises `StoreError`.

    Not guaranteed: that one part is left. What is young stays, what cannot be read, what `trust` has no say in, and what a part
    has no room for. Blocks for as long as the file system does.
    """
    return _compact(store, store / "v1" / "profiles", part_paths, partial(_merge_parts, trust=trust), most)


def compact_needs(store: Path, most: int | None = None) -> int:
    """The same for the files of what each profile needs. Who reads them finds the same needs as before, in the same order.

    Not guaranteed, besides: that the order is kept where one file has no room for all, or one pass does not merge all.
    """
    return _compact(store, needs_directory(store, ""), need_paths, _merge_needs, most)


def _compact(
    store: Path,
    profiles: Path,
    list_files: Callable[[Path], list[Path]],
    merge: Callable[[Path, list[Path]], Merged | None],
    most: int | None,
) -> int:
    """Raises `StoreError`."""
    trash = Trash(store / "v1" / "trash")
    place = trash.directory if os.access(trash.directory, os.F_OK) else store / "v1"
    if not os.access(place, os.W_OK | os.X_OK):
        return 0  # another user's: a file would come each time, and none go
    removed, left = 0, most
    for directory in _directories(profiles):
        try:
            with suppress(OSError):  # what a killed writer began here
                sweep(directory)
            paths = list_files(directory)
            if len(paths) <= _ABOVE:
                continue
            now = touched(directory)
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
    """Those of one signer. Raises OSError, `StoreError`."""
    if trust.keys:
        signers = Counter(_signer(path) for path in paths)
        trust = trust.only(max(trust.keys, key=lambda key_id: signers[key_id]))
    found: dict[str, Recipe] = {}
    known: dict[Any, Recipe] = {}
    size = 0
    held = []
    for path in paths:
        recipes = _ours(path, trust, known)
        fresh = {r.digest: r.size for r in recipes if r.digest not in found}
        if recipes and size + sum(fresh.values()) <= _MOST_BYTES:
            for recipe in recipes:
                add(found, recipe)
            size += sum(fresh.values())
            if all(recipe.digest in found for recipe in recipes):  # a profile takes only so many
                held.append(path)
    if len(held) < 2:
        return None
    return save_part(directory, found.values(), trust=trust), held


def _merge_needs(directory: Path, paths: list[Path]) -> Merged | None:
    """None of a profile's needs may be lost, for they may be pinned: what one file has no room for stays where it is.

    The merged file counts as written when the newest one that it holds was, so that younger ones still come first.
    Raises OSError, `StoreError`.
    """
    found: dict[Need, None] = {}
    held: dict[Path, float] = {}
    for path, at in sorted(((path, written(path)) for path in paths), key=lambda file: -file[1]):
        needs = named_needs(path)
        fresh = sum(need not in found for need in needs)
        # one that is half full stays, so that any two others find room
        if needs and len(needs) <= MOST_NEEDS // 2 and len(found) + fresh <= MOST_NEEDS:
            found.update(dict.fromkeys(needs))
            held[path] = at
    if len(held) < 2:
        return None
    newest = max(held.values())
    merged = directory / needs_name(found)
    if written(merged) >= newest and named_needs(merged):
        sync_directory(directory)  # one that is there holds all the others; it may be a young job's
    else:
        save_needs(directory, found, at=newest)
    return merged, list(held)


def _signer(path: Path) -> str:
    """What a part says of itself."""
    try:
        _, signature = split(read_plain(path, LARGEST_PART))
    except (ArtifactInvalid, OSError):  # as `_ours` finds out
        return ""
    return signature.key_id if signature is not None else ""


def _ours(path: Path, trust: Trust, known: dict[Any, Recipe]) -> list[Recipe]:
    """What is in a part that we may merge; nothing of another one, of which its readers say what is wrong with it."""
    try:
        sealed = read_plain(path, LARGEST_PART)
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
        if error.errno in _NOT_OURS:  # and nothing is wrong with the other ones
            return []
        raise


def _directories(profiles: Path) -> Iterator[Path]:
    """Raises `StoreError`."""
    try:
        names = sorted(path.name for path in profiles.iterdir())
    except FileNotFoundError:
        return
    except OSError as error:
        raise store_error(error, profiles) from error
    for name in names:
        with suppress(ValueError, OSError):
            if stat.S_ISDIR((profiles / profile_name(name)).lstat().st_mode):
                yield profiles / name


def _age(path: Path, now: float) -> float:
    try:
        return now - path.lstat().st_mtime
    except FileNotFoundError:
        return 0.0  # its writer has just put a larger one in its place
