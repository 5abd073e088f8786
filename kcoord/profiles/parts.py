"""Profiles: what jobs compiled, as recipes, in a directory of parts.

A profile is ``<store>/v1/profiles/<name>/``; what did not get there (no store, no agent, a disk that refused) is this node's
alone, in ``<local_dir>/profiles/<name>/``. Each writer adds a *part*, one file that is renamed into place and named after the set
of its recipes, so that equal nodes write one file. Reading merges all parts: nothing is locked, and nobody waits.
Old parts become one now and then (`kcoord.profiles.compaction`).

Not trusted: a part may be torn, another version's or another user's. It is checked as a frame from a stranger is. Since it names
functions that are imported and called, parts in the store are signed as artifacts are; what is this node's alone is not.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgpack

from kcoord.artifacts.signing import OFF, PROFILE, Trust, split
from kcoord.errors import ArtifactInvalid, KcoordError, StoreError
from kcoord.files.faults import (
    store_error,
)
from kcoord.files.private import (
    make_private,
)
from kcoord.files.reading import read_plain
from kcoord.files.shared_directory import paths_of, read_all, save
from kcoord.profiles.recipe import MOST_RECIPES, Recipe, add, merge
from kcoord.settings import Settings, is_profile_name
from kcoord.telemetry.events import Notices

LARGEST_PART = 256 << 20  # bytes
_FORMAT = b"kcoord-profile-1\n"
_DIGEST = hashlib.sha256().digest_size
_SUFFIX = ".recipes"


def roots(store: Path | None, local_dir: Path) -> list[Path]:
    """The directories of profiles; the first is where new parts go, if it can be written."""
    return [*([store / "v1" / "profiles"] if store else []), local_dir / "profiles"]


def profile_names(settings: Settings) -> list[str]:
    """The profiles there are. Raises `StoreError`. Blocks for as long as the file system does."""
    found = set()
    for root in _readable(settings):
        try:
            found |= {p.name for p in root.iterdir() if p.is_dir() and is_profile_name(p.name)}
        except FileNotFoundError:
            continue
        except OSError as error:
            raise store_error(error, root) from error
    return sorted(found)


def load_profile(settings: Settings, name: str, notices: Notices | None = None) -> list[Recipe]:
    """The recipes of all parts, each once, longest first; ties by order, then digest: the same for all who read the same parts.

    Parts that cannot be read, or that the settings' `Trust` refuses, are skipped with a notice. Raises `KcoordError` if there is
    no such profile, naming those there are. Blocks for as long as the file system does.
    """
    notices = Notices() if notices is None else notices
    trust = Trust.of(settings) if settings.store_root is not None else OFF
    there = profile_names(settings)  # lists the directory above, which refreshes the names that NFS remembers
    if name not in there:
        raise KcoordError(f"there is no profile {name!r}: there {_listed(there)}")
    found = merge(
        r
        for root in _readable(settings)
        for r in parts(root / name, notices, trust if root == _shared(settings) else OFF)
    )
    if not found:
        raise KcoordError(f"the profile {name!r} has no part that can be read: record it again")
    return sorted(found.values(), key=lambda r: (-r.seconds, r.order, r.digest))


def parts(directory: Path, notices: Notices, trust: Trust = OFF) -> Collection[Recipe]:
    """The recipes of all parts in `directory`, each once; what cannot be read is told, and skipped, and so is what `trust`
    refuses.
    """
    found: dict[str, Recipe] = {}  # however many parts hold a recipe, it is in memory once
    known: dict[Any, Recipe] = {}

    def read(path: Path) -> bool:
        recipes = _read_part(path, notices, trust, known)
        for recipe in recipes or ():
            add(found, recipe)
        return recipes is not None

    try:
        read_all(lambda: part_paths(directory), read)
    except OSError as error:
        notices.tell(f"a profile is skipped: {store_error(error, directory)}")
    return found.values()


def part_paths(directory: Path) -> list[Path]:
    """The parts in `directory`, sorted; none if there is no such directory. Raises OSError."""
    return paths_of(directory, _SUFFIX)


def encode_part(recipes: dict[str, Recipe]) -> bytes:
    """A part's content, unsigned; of recipes by digest. Equal recipes, equal bytes."""
    body = msgpack.packb([recipes[d].to_wire() for d in sorted(recipes)], unicode_errors="surrogatepass")
    return _FORMAT + hashlib.sha256(body).digest() + bytes(body)


def decode_part(content: bytes, known: dict[Any, Recipe] | None = None) -> list[Recipe]:
    """Raises ValueError if `content`, an unsigned part's, is torn or not tame. `known`: of `Recipe.from_wire`."""
    start = len(_FORMAT) + _DIGEST
    body = content[start:]
    if content[:start] != _FORMAT + hashlib.sha256(body).digest():
        raise ValueError("it is torn, or another version's")
    try:
        plain = msgpack.unpackb(body, unicode_errors="surrogatepass")
    except msgpack.exceptions.UnpackException as error:
        raise ValueError(f"it is no msgpack: {error}") from error
    if not isinstance(plain, list) or len(plain) > MOST_RECIPES:
        raise ValueError("it is no list of recipes")
    return [Recipe.from_wire(data, known) for data in plain]


def save_part(directory: Path, recipes: Iterable[Recipe], earlier: Path | None = None, trust: Trust = OFF) -> Path:
    """Write `recipes` as one part, atomically and durably, signed if `trust` has a key; returns its path. Raises `StoreError`.

    `earlier` is what the same writer's last call returned, and all in it must be in `recipes`: it is removed.
    """
    by_digest = merge(recipes)
    content = trust.seal(PROFILE, encode_part(by_digest))
    # nobody puts his in the place of one that another key has signed
    name = hashlib.sha256(" ".join([trust.signer, *sorted(by_digest)]).encode()).hexdigest() + _SUFFIX
    if len(content) > LARGEST_PART:
        raise StoreError(f"{directory}: a part of {len(content)} bytes is too large: record less under one name")
    return save(directory, name, content, earlier)


def _readable(settings: Settings) -> list[Path]:
    make_private(settings.local_dir)  # what another user put into a directory of a known name is not ours to run
    return roots(settings.store_root, settings.local_dir)


def _shared(settings: Settings) -> Path | None:
    """The directory of the store's profiles."""
    return roots(settings.store_root, settings.local_dir)[0] if settings.store_root is not None else None


def _listed(names: list[str]) -> str:
    return f"are {', '.join(names)}" if names else "are none yet (KCOORD_PROFILE records one)"


def _read_part(path: Path, notices: Notices, trust: Trust, known: dict[Any, Recipe]) -> list[Recipe] | None:
    """None: it is gone. Empty: it cannot be read."""
    try:
        sealed = read_plain(path, LARGEST_PART)
        doubt = trust.doubt(PROFILE, sealed)
        if doubt is not None:
            what = "is skipped" if trust.required else "is used all the same (KCOORD_TRUST=warn)"
            notices.tell(
                f"{doubt.of(path)}; a part of a profile {what}", about=f"profile {path.parent.name}: {doubt.fault}"
            )
            if trust.required:
                return []
        content, _ = split(sealed)
        return decode_part(content, known)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ESTALE:  # the same on NFS v3
            return None
        notices.tell(f"a part of a profile is skipped: {store_error(error, path)}")
    except (ValueError, ArtifactInvalid) as error:
        notices.tell(f"{path}: a part of a profile is skipped: {error}")
    return []
