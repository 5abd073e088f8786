"""Making few parts of a profile's many, safe beside its readers and writers, and beside others that do the same.

Each agent of each job may leave a part: the sets of recipes differ, where nodes run different stages, or a job was ended early.
Once nobody writes to them any more, one part that holds all of them takes their place: it is there, durably, before they go, and
they go by way of the trash. A reader that sees both has equal recipes twice; one that misses a part looks again.

Signatures keep their meaning: whoever has keys merges what these keys verify, and signs it; whoever has none merges what is not
signed, and leaves alone what is. So a recipe that nobody vouched for is in no signed part, and none that was loses its signature.
"""

from __future__ import annotations

import errno
import random
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from kcoord.artifacts.publish import store_error
from kcoord.artifacts.reading import read_plain
from kcoord.artifacts.signing import OFF, PROFILE, Trust, split
from kcoord.artifacts.sweep import sweep, touched
from kcoord.artifacts.trash import Trash
from kcoord.errors import ArtifactInvalid
from kcoord.profiles.parts import LARGEST_PART, decode_part, part_paths, save_part
from kcoord.profiles.recipe import Recipe, add
from kcoord.settings import profile_name

_ABOVE = 16  # parts; that many cost a reader nothing to speak of
_SETTLED = 3600.0  # seconds; a younger part's agent is about to put a larger one in its place
_NOT_OURS = (errno.ENOENT, errno.ESTALE, errno.EACCES, errno.EPERM)  # it goes this very moment, or is another user's
_MOST_BYTES = 64 << 20  # of one merged part's recipes, as an agent has them in memory


def compact(store: Path, trust: Trust = OFF, most: int | None = None) -> int:
    """Merge the parts of each profile of `store`, `most` at most of all of them; returns how many went. Raises `StoreError`.

    Not guaranteed: that one part is left. What is young stays, what cannot be read, what `trust` has no say in, and what a part
    has no room for. Blocks for as long as the file system does.
    """
    profiles = store / "v1" / "profiles"
    removed, left = 0, most
    for directory in _directories(profiles):
        try:
            with suppress(OSError):  # what a killed writer began here
                sweep(directory)
            paths = part_paths(directory)
            if len(paths) <= _ABOVE:
                continue
            now = touched(directory)
            settled = [path for path in paths if _age(path, now) > _SETTLED]
            random.shuffle(settled)  # the first ones may be those that are not ours to merge
            removed += _merge(directory, settled[:left], trust, Trash(store / "v1" / "trash"))
            left = most - removed if most is not None else None
        except OSError as error:
            if error.errno not in _NOT_OURS:
                raise store_error(error, directory) from error
    return removed


def _merge(directory: Path, paths: Iterable[Path], trust: Trust, trash: Trash) -> int:
    """Returns how many of `paths` another part holds now, and are gone. Raises OSError, `StoreError`."""
    found: dict[str, Recipe] = {}
    size = 0
    held = []
    for path in paths:
        recipes = _ours(path, trust)
        fresh = {r.digest: r.size for r in recipes if r.digest not in found}
        if recipes and size + sum(fresh.values()) <= _MOST_BYTES:
            for recipe in recipes:
                add(found, recipe)
            size += sum(fresh.values())
            if all(recipe.digest in found for recipe in recipes):  # a profile takes only so many
                held.append(path)
    if len(held) < 2:
        return 0
    merged = save_part(directory, found.values(), trust=trust)
    return sum(trash.take(path) is not None for path in held if path != merged)


def _ours(path: Path, trust: Trust) -> list[Recipe]:
    """What is in a part that we may merge; nothing of another one, of which its readers say what is wrong with it."""
    try:
        sealed = read_plain(path, LARGEST_PART)
        content, signature = split(sealed)
        if trust.keys:
            if signature is None or not trust.verifies(PROFILE, sealed):
                return []
        elif signature is not None or trust.required:
            return []
        return decode_part(content)
    except (FileNotFoundError, ArtifactInvalid, ValueError):
        return []
    except OSError as error:
        if error.errno == errno.ESTALE:
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
