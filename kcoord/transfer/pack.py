"""A profile's pack (`kcoord.profiles.packs`) is written once, and read by each node as one file.

The format is a bundle's. A reader copies the file, and judges the index on that copy before it obeys a size or a name. Each
artifact is trusted and verified when somebody asks for it, as one from the store is: a pack that is damaged, or forged, costs the
look-ups that it would have saved.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from kcoord.artifacts.local import has_room
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.object import StoredObject
from kcoord.artifacts.signing import OVERHEAD, VERIFIES_ONLY
from kcoord.artifacts.store import Store, manifest_digest
from kcoord.errors import ArtifactInvalid, KcoordError, StoreError
from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT, staging_name
from kcoord.files.faults import store_error, store_errors
from kcoord.files.rename import sync_directory
from kcoord.files.trash import Trash
from kcoord.profiles.automatic import is_automatic
from kcoord.profiles.packs import LARGEST_PACK, newest_pack, pack_name, packs_directory, packs_of, signer_of
from kcoord.profiles.parts import forget_superfluous
from kcoord.transfer.bundle import Bundle, contents_of, gather, head_of
from kcoord.transfer.bundle_index import BundleInvalid, Index, Packed
from kcoord.transfer.reads import Reads

MOST_PACKED = 20_000  # artifacts
LARGEST_PACKED = 8 << 20  # bytes of one artifact; a larger one is a long read in any case
_IN_INDEX = 256  # bytes of the index for each artifact, at most
_LARGEST_INDEX = (MOST_PACKED + 1) * _IN_INDEX + OVERHEAD  # bytes: one that nobody signed is decoded, too
_ABREAST = 16  # artifacts that the writer reads at a time
_IN_MEMORY = 64 << 20  # bytes of artifacts that the writer keeps
_CHUNK = 1 << 20  # bytes: what an NFS client reads or writes at once
_READ_WITHIN = 30.0  # seconds; artifacts that are looked up one by one come as fast from a store that is so slow
_TIMES_ON_DISK = 4  # of the pack's size must be free: its artifacts follow, unpacked


class PackUnused(KcoordError):
    """A pack cannot be used; its artifacts are looked up."""


# Writing.


def write_pack(
    store: Store, profile: str, digests: Iterable[str], *, earlier: Pack | None = None, within: float = math.inf
) -> frozenset[str]:
    """Write a pack of the artifacts `digests` of `store`, and move the profile's older packs of the same signer to the trash.

    Returns the digests of its artifacts: without those that are missing, do not verify, are too large, or find no room, the last
    ones first. What `earlier` has comes first, and from there; the store is read for `within` seconds, or one artifact.

    Equal artifacts make one file (with one key). Those beyond 64 MiB are read twice. It is signed if the store's `trust` has
    a key; it then holds what known keys have signed. Of automatic profiles the oldest packs beyond a hundred are removed. Raises
    `StoreError`.
    """
    if not store.trust.publishes:
        raise StoreError(f"{store.root}: {VERIFIES_ONLY}", VERIFIES_ONLY)
    files, here = (earlier.files, earlier.digests) if earlier is not None else (None, frozenset[str]())
    reads = Reads(store, abreast=_ABREAST, largest=LARGEST_PACKED, room=_IN_MEMORY, here=files)
    wanted = list(dict.fromkeys(digests))
    entries = itertools.chain(
        gather(store, (digest for digest in wanted if digest in here), {}, reads=reads),
        _in_time(gather(store, (digest for digest in wanted if digest not in here), {}, reads=reads), within),
    )
    found = _fitting(entries)
    index = Index(tuple(sorted(found, key=lambda entry: entry.digest)))
    trust = replace(store.trust)  # its keys may be exchanged meanwhile
    head = head_of(index, trust)
    directory = packs_directory(store.root, profile)
    path = directory / pack_name(hashlib.sha256(head).hexdigest(), trust.signer)
    staged = store.root / LAYOUT / "staging" / f"{staging_name()}.part"
    try:
        beneath.check(staged.parent, store.root)
        with staged.open("wb", buffering=_CHUNK) as file:
            file.write(head)
            for content in contents_of(store, index, {}, reads):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
        for missing in (directory.parent, directory):
            with suppress(FileExistsError):
                beneath.mkdir(missing, store.root)
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
    return frozenset(entry.digest for entry in index.artifacts)


def _in_time(entries: Iterable[Packed], seconds: float) -> Iterator[Packed]:
    """Those that come within so many seconds of the first demand, and one more."""
    until = time.monotonic() + seconds
    for entry in entries:
        yield entry
        if time.monotonic() > until:
            break


def _fitting(entries: Iterable[Packed]) -> list[Packed]:
    found: list[Packed] = []
    room = LARGEST_PACK - _IN_INDEX
    for entry in entries:
        size = entry.manifest.size + entry.payload.size + _IN_INDEX
        if size > LARGEST_PACKED:
            continue
        room -= size
        if room < 0 or len(found) == MOST_PACKED:
            break
        found.append(entry)
    return found


# Reading.


class Pack:
    """A pack of which this process has a copy: a source of artifacts, like the `Store`. Thread-safe.

    `place` is the file in the store, `written` its modification time.
    """

    def __init__(self, store: Store, place: Path, written: float, bundle: Bundle) -> None:
        self.place, self.written = place, written
        self._store, self._bundle = store, bundle
        self._places = bundle.places()
        self._reading = threading.Lock()  # protects the file's position, and keeps it open during a read
        self._closed = False

    @property
    def digests(self) -> frozenset[str]:
        """The artifacts, without those that were found damaged."""
        return frozenset(self._places)

    def announced(self, digest: str) -> str | None:
        """The SHA-256 of the artifact's manifest file, as READY would announce it; None if the pack lacks it."""
        found = self._places.get(digest)
        return None if found is None or self._closed else found[1].manifest.sha256

    def stated(self, digest: str) -> tuple[Manifest, str] | None:
        """As `Store.stated`; None if the pack lacks it. Raises `ArtifactInvalid`; the pack lacks that artifact from then on."""
        with self._dropping(digest):
            files = self._files(digest)
            return files and (self._store.trusted(self.place / digest, files[0]), manifest_digest(files[0]))

    def fetch(self, digest: str, announced: str | None = None) -> tuple[Manifest, dict[str, bytes], str] | None:
        """As `Store.fetch`; None if the pack lacks it, or holds another. Raises `ArtifactInvalid` as `stated` does."""
        if announced is not None and self.announced(digest) != announced:
            return None
        with self._dropping(digest):
            files = self._files(digest)
            return files and self._store.checked(self.place / digest, *files)

    def files(self, digest: str) -> StoredObject | None:
        """As `Store.object`; None if the pack lacks it. Raises `ArtifactInvalid` as `stated` does."""
        with self._dropping(digest):
            files = self._files(digest)
            return files and StoredObject(self._store.checked(self.place / digest, *files)[0], *files)

    @contextmanager
    def _dropping(self, digest: str) -> Iterator[None]:
        try:
            yield
        except ArtifactInvalid:
            self._places.pop(digest, None)
            raise

    def _files(self, digest: str) -> tuple[bytes, bytes] | None:
        found = self._places.get(digest)
        with self._reading:
            if found is None or self._closed:
                return None
            try:
                return self._bundle.files(*found)
            except (BundleInvalid, StoreError) as error:
                raise ArtifactInvalid(f"{self.place}: {error}") from error

    def close(self) -> None:
        """Give the copy's space back. Waits for a read of one artifact from the local disk."""
        with self._reading:
            self._closed = True
            self._bundle.close()


def read_pack(store: Store, profile: str, local_dir: Path, unless: Path | None = None) -> Pack | None:
    """Copy the pack to read for `profile` to the disk of `local_dir`, into a file without a name, which ends with this process.

    None if there is none, or if it is the file `unless`. Raises `PackUnused` for a pack that cannot be used, and where there is
    no room for it. Takes about half a minute at most, unless the store hangs.
    """
    for _ in range(2):  # it may be replaced between its listing and its opening
        try:
            path = newest_pack(store.root, profile, store.trust)
            if path is None or path == unless:
                return None
            copy, written = _copied(path, local_dir)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, StoreError) as error:
            raise PackUnused(str(error)) from error
        return _opened(store, path, written, copy)
    return None


def look_at_pack(store: Store, path: Path) -> frozenset[str]:
    """The digests that a pack states, without a copy of it. Raises `PackUnused`."""
    try:
        with Bundle(path, store.trust, largest_index=_LARGEST_INDEX) as bundle:
            return frozenset(entry.digest for entry in bundle.index.artifacts)
    except (BundleInvalid, StoreError) as error:
        raise PackUnused(str(error)) from error


def _opened(store: Store, path: Path, written: float, copy: BinaryIO) -> Pack:
    """Judges the index first. Closes `copy` if it is refused."""
    try:
        return Pack(store, path, written, Bundle(path, store.trust, copy, _LARGEST_INDEX))
    except (BundleInvalid, StoreError) as error:
        raise PackUnused(str(error)) from error


def _copied(path: Path, local_dir: Path) -> tuple[BinaryIO, float]:
    """A copy of the file at `path`, and the file's modification time. Raises OSError, `StoreError` and `PackUnused`."""
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_PACK:
            raise PackUnused(f"{path}: it is no plain file of at most {LARGEST_PACK >> 20} MiB")
        with store_errors(local_dir):
            if not has_room(local_dir, _TIMES_ON_DISK * found.st_size):
                raise PackUnused(f"{local_dir}: its disk has too little room for a pack of {found.st_size >> 20} MiB")
            copy = tempfile.TemporaryFile(dir=local_dir)  # noqa: SIM115 - its owner closes it
        try:
            _copy(source, copy, path, found.st_size)
        except BaseException:
            copy.close()
            raise
    finally:
        os.close(source)
    return copy, found.st_mtime


def _copy(source: int, copy: BinaryIO, path: Path, size: int) -> None:
    begun, left = time.monotonic(), size
    while left > 0 and (chunk := os.read(source, min(left, _CHUNK))):
        left -= len(chunk)
        copy.write(chunk)
        if time.monotonic() > begun + _READ_WITHIN:
            raise PackUnused(f"{path}: the store is slow: {size - left:,} of {size:,} bytes in {_READ_WITHIN:g} s")
    copy.seek(0)
