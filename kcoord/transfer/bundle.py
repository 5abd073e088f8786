"""A bundle: artifacts and profiles of a store in one file, for a store that is elsewhere.

=========================================== ================================================================
``kcoord-bundle-1\n``                       16 bytes
length of the index                         8 bytes, big-endian
the index, signed if there is a key         msgpack: the blobs, in order, each with its size and SHA-256
the blobs                                   each artifact's manifest and payload as they are in the store, then profiles
=========================================== ================================================================

The index alone tells what a blob is; paths, times and hosts are in the manifests only. Equal artifacts and profiles make equal
bytes (with one version of zstd, and one key).

Not trusted: the index is judged before anything else is read, it bounds every read, and all blobs are verified before anything is
written. Each is verified again, in memory, before it goes into the store.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.object import StoredObject, check_sizes
from kcoord.artifacts.signing import BUNDLE, MANIFEST, Trust, split
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, StoreError
from kcoord.files.atomic import staging_name
from kcoord.files.faults import store_error, store_errors
from kcoord.files.reading import open_unwaiting
from kcoord.files.sweep import sweep_beside
from kcoord.transfer.bundle_index import Blob, BundleInvalid, Index, Packed
from kcoord.transfer.reads import Reads

_MAGIC = b"kcoord-bundle-1\n"
_LENGTH = 8
_LARGEST_INDEX = 256 << 20  # bytes

Progress = Callable[[int, int], object]
"""``progress(bytes done, bytes in all)``."""


# Export.


@dataclass
class Exported:
    """Counts of artifacts and profiles, and the file's bytes. `left_out`: digests, and why. `marked`: how many of both the
    bundle's signature does not vouch for.
    """

    artifacts: int = 0
    profiles: int = 0
    marked: int = 0
    size: int = 0
    left_out: dict[str, str] = field(default_factory=dict)


def export(
    store: Store,
    digests: Iterable[str],
    profiles: dict[str, bytes],
    out: Path,
    progress: Progress = lambda a, b: None,
    *,
    unsigned: bool = False,
    doubtful: Collection[str] = (),
) -> Exported:
    """Write a bundle beside `out`, and rename it to `out` when it is whole. An artifact that the store lacks, or that does not
    verify, is left out.

    Signed if the store's `trust` has a key. The bundle's signature then vouches for the artifacts that a known key has signed.
    The others are left out under any policy, or, with `unsigned`, marked, as the profiles in `doubtful` are. Memory holds one
    artifact at a time; each is read twice, since the index comes first. Raises `StoreError` if the store or the file's disk
    fails, or an artifact is replaced meanwhile.
    """
    done, trust = Exported(), store.trust
    if unsigned:
        store = Store(store.root, Trust("off", trust.keys))
    packed = tuple(gather(store, sorted(set(digests)), done.left_out, unsigned=unsigned))
    blobs = tuple((name, Blob.of(text)) for name, text in sorted(profiles.items()))
    index = Index(packed, blobs, frozenset(doubtful) if trust.keys else frozenset())
    head = head_of(index, trust)
    part = out.with_name(f".{out.name}.{staging_name()}.part")
    written = 0
    try:
        if out.exists() and not out.is_file():  # a device or a pipe would be gone by the rename
            raise StoreError(f"{out}: it is there, and no plain file: name another")
        with suppress(OSError):  # a directory may take files, and list none
            sweep_beside(out)
        with part.open("wb") as file:
            file.write(head)
            for content in contents_of(store, index, profiles):
                file.write(content)
                written += len(content)
                progress(written, index.size)
            file.flush()
            os.fsync(file.fileno())
        part.replace(out)
    except OSError as error:
        raise store_error(error, out) from error
    finally:
        with suppress(OSError):  # it was never there: a part of its path is none, or must not be looked at
            part.unlink(missing_ok=True)
    done.artifacts, done.profiles, done.size = len(packed), len(blobs), len(head) + written
    done.marked = sum(not entry.vouched for entry in packed) + len(index.doubtful)
    return done


def gather(
    store: Store,
    digests: Iterable[str],
    left_out: dict[str, str],
    *,
    unsigned: bool = False,
    reads: Reads | None = None,
) -> Iterator[Packed]:
    """The index's entries for the artifacts `digests`, each verified. The digests that `export` leaves out go to `left_out`, with
    reasons. Without `reads`, memory holds one artifact at a time. Raises `StoreError` if the store fails.
    """
    trust = store.trust
    for digest, found, why in (reads or Reads(store)).of(digests, "it is not in the store"):
        if found is None:
            left_out[digest] = why
            continue
        vouched = not trust.keys or trust.verifies(MANIFEST, found.encoded)
        if vouched or unsigned:
            yield Packed(digest, Blob.of(found.encoded), Blob.of(found.payload), vouched)
        else:
            left_out[digest] = "no key that is known here has signed it: --unsigned takes it, marked"


def head_of(index: Index, trust: Trust) -> bytes:
    """A bundle's bytes before its blobs, signed if `trust` has a key that signs."""
    sealed = trust.seal(BUNDLE, index.encode())
    return _MAGIC + len(sealed).to_bytes(_LENGTH, "big") + sealed


def contents_of(
    store: Store, index: Index, profiles: Mapping[str, bytes], reads: Reads | None = None
) -> Iterator[bytes]:
    """The blobs, in the index's order. Raises `StoreError` if an artifact has changed since the index was made."""
    digests = [entry.digest for entry in index.artifacts]
    found_ones = (reads or Reads(store)).of(digests, "it was removed meanwhile")
    for entry, (_, found, why) in zip(index.artifacts, found_ones, strict=True):
        if found is not None and Blob.of(found.encoded) != entry.manifest:
            found, why = None, "it was replaced meanwhile"
        if found is None:
            raise StoreError(
                f"{store.home(entry.digest)} cannot be exported: {why}: see 'kcoord verify', and export again"
            )
        yield found.encoded
        yield found.payload
    for name, _ in index.profiles:
        yield profiles[name]


# Import.


@dataclass
class Imported:
    """Counts of artifacts: published now, there already, and refused: a signature is required, and nobody vouches for them."""

    published: int = 0
    kept: int = 0
    refused: int = 0


class Bundle:
    """An open bundle, whose index is trusted and states the file's size. Close it, or use it in a ``with``.

    `path` names it to people; it is opened, unless `file` is open already. Raises `BundleInvalid`, also for an index of more than
    `largest_index` bytes, or `StoreError` if the file cannot be read. `doubt`: the reason why no key of ours vouches for it,
    under a policy that lets it pass. `vouched`: True if a key of ours does, under any policy; only then its content may be signed
    anew, except for what the index marks.
    """

    def __init__(
        self, path: Path, trust: Trust, file: BinaryIO | None = None, largest_index: int = _LARGEST_INDEX
    ) -> None:
        self._path, self._trust, self._largest_index = path, trust, largest_index
        self.doubt: ArtifactDistrusted | None = None
        self.vouched = False
        with store_errors(path):
            self._file: BinaryIO = file or open(path, "rb", opener=open_unwaiting)  # noqa: SIM115 - closed by `close`
        try:
            with store_errors(path):
                self.index, self._start = self._read_index()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Bundle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def verify(self, progress: Progress = lambda a, b: None) -> None:
        """Read and check every byte, and write nothing. Raises `BundleInvalid`."""
        for _ in self._artifacts(progress):
            pass
        for _ in self.profiles():
            pass

    def publish(self, store: Store, progress: Progress = lambda a, b: None, *, dry_run: bool = False) -> Imported:
        """Publish the artifacts into `store`, each verified once more; those that are there already, and verify, stay.

        Call `verify` first. May be interrupted and begun again: each artifact is published by one rename. `dry_run`: only count.
        Raises `BundleInvalid` if the file has changed since, and `StoreError`.
        """
        done = Imported()
        for entry, found in self._artifacts(progress):
            encoded = found.encoded
            digest, vouched = entry.digest, self.vouched and entry.vouched
            if self._trust.required and not (vouched or self._trust.verifies(MANIFEST, encoded)):
                done.refused += 1
                continue
            try:
                there = store.object(digest) is not None
            except ArtifactDistrusted as error:
                there = error.unknown_key  # not ours to replace
            except ArtifactInvalid:
                there = False
            if there:
                done.kept += 1
                continue
            done.published += 1
            if not dry_run:
                store.publish_object(replace(found, encoded=self._resealed(encoded)) if vouched else found)
        return done

    def places(self) -> dict[str, tuple[int, Packed]]:
        """Each artifact's position in the file, for `files`, and its entry, by the digest of its key."""
        found, position = {}, self._start
        for entry in self.index.artifacts:
            found[entry.digest] = position, entry
            position += entry.manifest.size + entry.payload.size
        return found

    def files(self, position: int, entry: Packed) -> tuple[bytes, bytes]:
        """An artifact's manifest file and payload: the bytes that the index states, and nothing else is verified.

        Raises `BundleInvalid`, or `StoreError` if the file cannot be read. Not thread-safe.
        """
        label = f"the artifact {entry.digest[:12]}"
        self._seek(position)
        return self._blob(label, entry.manifest), self._blob(label, entry.payload)

    def profiles(self) -> Iterator[tuple[str, bytes]]:
        """Names and documents of the profiles. Raises `BundleInvalid`."""
        self._seek(self._start + sum(p.manifest.size + p.payload.size for p in self.index.artifacts))
        for name, blob in self.index.profiles:
            yield name, self._blob(f"the profile {name}", blob)

    def _read_index(self) -> tuple[Index, int]:
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise BundleInvalid(f"{self._path}: it is no plain file")
        start = len(_MAGIC) + _LENGTH
        head = self._file.read(start)
        length = int.from_bytes(head[len(_MAGIC) :], "big")
        if len(head) != start or not head.startswith(_MAGIC):
            raise BundleInvalid(f"{self._path}: it is no bundle of this version: make one with 'kcoord export'")
        if length > min(self._largest_index, found.st_size - start):
            raise BundleInvalid(f"{self._path}: it ends before its index does, or has a huge one: copy it again")
        try:
            sealed = self._file.read(length)
            self.doubt = self._trust.doubt(BUNDLE, sealed)
            self.vouched = self._trust.verifies(BUNDLE, sealed)
            if self.doubt is not None and self._trust.required:
                raise BundleInvalid(f"{self._path}: {self.doubt.fault}: {_REMEDY}")
            plain, _ = split(sealed)
            index = Index.decode(plain)
        except ArtifactInvalid as error:
            raise BundleInvalid(f"{self._path}: {error}") from error
        stated = start + length + index.size
        if found.st_size != stated:
            raise BundleInvalid(
                f"{self._path}: it has {found.st_size} bytes, and its index states {stated}: copy it again"
            )
        return index, start + length

    def vouches_for(self, profile: str) -> bool:
        """True if a key of ours vouches for `profile`."""
        return self.vouched and profile not in self.index.doubtful

    def _artifacts(self, progress: Progress) -> Iterator[tuple[Packed, StoredObject]]:
        """Each artifact, every byte verified. Raises `BundleInvalid`."""
        self._seek(self._start)
        done, size = 0, self.index.size
        for entry in self.index.artifacts:
            label = f"the artifact {entry.digest[:12]}"
            encoded = self._blob(label, entry.manifest)
            try:
                manifest = Manifest.decode(encoded)
                if manifest.key.digest != entry.digest:
                    raise ArtifactInvalid("it is another key's")
                check_sizes(manifest, entry.payload.size)
                found = StoredObject(manifest, encoded, self._blob(label, entry.payload))
                found.contents()
            except ArtifactInvalid as error:
                raise BundleInvalid(f"{self._path}: {label}: {error}") from error
            yield entry, found
            done += entry.manifest.size + entry.payload.size
            progress(done, size)

    def _blob(self, label: str, blob: Blob) -> bytes:
        with store_errors(self._path):
            content = self._file.read(blob.size)
        if Blob.of(content) != blob:
            raise BundleInvalid(f"{self._path}: {label} is not what the index states: copy the file again")
        return content

    def _seek(self, position: int) -> None:
        with store_errors(self._path):
            self._file.seek(position)

    def _resealed(self, encoded: bytes) -> bytes:
        """The manifest's file `encoded`, signed anew if its own signature is not ours."""
        if self._trust.verifies(MANIFEST, encoded):
            return encoded
        content, _ = split(encoded)
        return self._trust.seal(MANIFEST, content)


_REMEDY = "export it with a key that is known here, or import it with KCOORD_TRUST=off if you know where it comes from"
