"""Packs that move artifacts and profiles from one store to another: `export` and `import`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgpack

from kcoord.artifacts.object import StoredObject
from kcoord.artifacts.signing import MANIFEST, Trust, split
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, StoreError
from kcoord.files.atomic import staging_name
from kcoord.files.faults import store_error
from kcoord.files.reading import unpack
from kcoord.packs.index import MOST_LISTED, Use
from kcoord.packs.pack import Pack, Progress, write
from kcoord.packs.recipe import Recipe, merge
from kcoord.packs.recipe_files import decode_part, encode_part


def encode_profile(recipes: Iterable[Recipe], digests: Iterable[str]) -> bytes:
    """A profile as a document of a pack: its recipes, and the artifacts that its jobs used. Equal profiles make equal bytes."""
    return bytes(msgpack.packb([encode_part(merge(recipes)), [bytes.fromhex(d) for d in sorted(set(digests))]]))


def decode_profile(data: bytes) -> tuple[list[Recipe], list[str]]:
    """Raises ValueError if it is torn or malformed."""
    try:
        part, digests = unpack(data, 3 + MOST_LISTED)
        if not isinstance(part, bytes) or not isinstance(digests, list) or len(digests) > MOST_LISTED:
            raise ValueError("it holds something else")
        if not all(isinstance(digest, bytes) and len(digest) == 32 for digest in digests):
            raise ValueError("it names something that is no artifact")
        return decode_part(part), [digest.hex() for digest in digests]
    except TypeError as error:
        raise ValueError(f"it is no profile: {error}") from error


@dataclass
class Exported:
    """Counts of artifacts and profiles, and the file's bytes. `left_out`: digests, and why."""

    artifacts: int = 0
    profiles: int = 0
    size: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


def export(
    store: Store, uses: Iterable[Use], profiles: Mapping[str, bytes], out: Path, progress: Progress = lambda a, b: None
) -> Exported:
    """Write a pack beside `out`, and rename it to `out` when it is whole; ``progress(artifacts done, in all)``.

    An artifact that the store lacks, or that does not verify, is left out; and, if the store's `trust` has a key, one that no
    known key has signed, for the pack is signed. Memory holds one artifact at a time. Raises `StoreError` if the store or the
    file's disk fails.
    """
    done, wanted = Exported(), sorted({use.digest: use for use in uses}.values(), key=lambda use: use.digest)
    part = out.with_name(f".{out.name}.{staging_name()}.part")
    try:
        if out.exists() and not out.is_file():  # a device or a pipe would be gone by the rename
            raise StoreError(f"{out}: it is there, and no plain file: name another")
        with part.open("wb") as file:
            index = write(file, store.trust, _found(store, wanted, done.left_out, progress), profiles)
            file.flush()
            os.fsync(file.fileno())
            done.size = file.tell()
        part.replace(out)
    except OSError as error:
        raise store_error(error, out) from error
    finally:
        with suppress(OSError):  # it was never there: a part of its path is none, or must not be looked at
            part.unlink(missing_ok=True)
    done.artifacts, done.profiles = len(index.packed), len(index.profiles)
    return done


def _found(
    store: Store, uses: list[Use], left_out: dict[str, str], progress: Progress
) -> Iterator[tuple[Use, StoredObject]]:
    for number, use in enumerate(uses, 1):
        try:
            found = store.object(use.digest)
            if found is None:
                left_out[use.digest] = "it is not in the store"
            elif store.trust.keys and not store.trust.verifies(MANIFEST, found.encoded):
                left_out[use.digest] = "no key that is known here has signed it"
            else:
                yield use, found
        except ArtifactInvalid as error:
            left_out[use.digest] = str(error)
        progress(number, len(uses))


@dataclass
class Imported:
    """Counts of artifacts: published now, and there already."""

    published: int = 0
    kept: int = 0


def import_artifacts(pack: Pack, store: Store, progress: Progress = lambda a, b: None) -> Imported:
    """Publish the artifacts of `pack` into `store`, each verified; those that are there already, and verify, stay.

    Verify the whole pack first. May be interrupted and begun again: each artifact is published by itself. An artifact that a
    known key vouches for, by its own signature or the pack's, is signed anew if it has none of ours.
    Raises `PackInvalid` if the file has changed since, and `StoreError`.
    """
    done = Imported()
    for found in pack.objects(progress):
        if _is_there(store, found.manifest.key.digest):
            done.kept += 1
            continue
        store.publish_object(_resealed(store.trust, found) if pack.vouched else found)
        done.published += 1
    return done


def _is_there(store: Store, digest: str) -> bool:
    try:
        return store.object(digest) is not None
    except ArtifactDistrusted as error:
        return error.unknown_key  # not ours to replace
    except ArtifactInvalid:
        return False


def _resealed(trust: Trust, found: StoredObject) -> StoredObject:
    if not trust.keys or trust.verifies(MANIFEST, found.encoded):
        return found
    return replace(found, encoded=trust.seal(MANIFEST, split(found.encoded)[0]))
