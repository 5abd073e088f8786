"""A pack: objects and an index, and profiles if it has any, in one file that is written and read in one piece.

======================================== =============================================================
``kcoord-pack-1\\n``                      14 bytes
the objects                              in the index's order (`kcoord.artifacts.object`)
the documents of profiles                in the index's order
the index, signed if there is a key      `kcoord.packs.index`
the length of the index                  8 bytes, big-endian
======================================== =============================================================

The index comes last, so that a writer reads each artifact once. It alone tells what the file holds: a reader judges its signature
and every number before it reads anything else, and each object is trusted and verified when somebody asks for it, as one of the
store is. A pack that is damaged, or forged, costs the look-ups that it would have saved. Equal artifacts and profiles make equal
bytes, with one version of zstd and one key.
"""

from __future__ import annotations

import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

from kcoord.artifacts.local import has_room
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.object import StoredObject, read_object
from kcoord.artifacts.signing import OVERHEAD, PACK, UNSIGNED, Trust, split
from kcoord.artifacts.store import Store, manifest_digest
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files import beneath
from kcoord.files.faults import store_errors
from kcoord.files.reading import open_unwaiting
from kcoord.packs.index import ANY_NUMBER, MOST_LISTED, Index, PackDistrusted, Packed, PackInvalid, Use, sha256
from kcoord.packs.pack_files import LARGEST_PACK, newest_pack

LARGEST_INDEX = 40 << 20  # bytes, of a profile's pack: `MOST_LISTED` entries with long places
_LARGEST_INDEX_OF_ALL = 256 << 20
_MAGIC = b"kcoord-pack-1\n"
_LENGTH = 8
_CHUNK = 1 << 20  # bytes: what an NFS client reads at once
_READ_WITHIN = 30.0  # seconds; artifacts that are looked up one by one come as fast from a store that is so slow
_TIMES_ON_DISK = 4  # of the pack's size must be free: its artifacts follow, unpacked

Progress = Callable[[int, int], object]
"""``progress(bytes done, bytes in all)``."""


def write(
    file: BinaryIO, trust: Trust, artifacts: Iterable[tuple[Use, StoredObject | None]], profiles: Mapping[str, bytes]
) -> Index:
    """Write a pack: the verified objects of `artifacts`, the names of those without one, and the documents of `profiles`.

    Signed if `trust` has a key. Returns the index. Raises OSError of `file`.
    """
    packed, listed = [], []
    file.write(_MAGIC)
    for use, found in artifacts:
        if found is None:
            listed.append(use)
            continue
        file.writelines(found.pieces())
        packed.append(Packed(use, found.size, manifest_digest(found.encoded)))
    file.writelines(text for _, text in sorted(profiles.items()))
    documents = tuple((name, len(text), sha256(text)) for name, text in sorted(profiles.items()))
    index = Index(tuple(packed), tuple(listed), documents)
    sealed = trust.seal(PACK, index.encode())
    file.write(sealed + len(sealed).to_bytes(_LENGTH, "big"))
    return index


class Pack:
    """An open pack, whose index is trusted and states the file's size: a source of artifacts, like the `Store`. Thread-safe.

    Close it, or use it in a ``with``. `place` names it to people, and is opened unless `file` is open already. `vouched`: a
    key of ours has signed it, or there is no key here. Raises `PackInvalid`, also for more than `most` artifacts, and
    `StoreError` if the file cannot be read.
    """

    def __init__(self, place: Path, store: Store, file: BinaryIO | None = None, *, most: int = ANY_NUMBER) -> None:
        self.place, self._store = place, store
        self._largest_index = LARGEST_INDEX + OVERHEAD if most <= MOST_LISTED else _LARGEST_INDEX_OF_ALL
        self._reading = threading.Lock()  # protects the file's position, and keeps it open during a read
        self._closed = False
        self.damaged: set[str] = set()
        """Digests of artifacts whose objects do not verify."""
        with store_errors(place):
            self._file: BinaryIO = file or open(place, "rb", opener=open_unwaiting)  # noqa: SIM115 - closed by `close`
        try:
            with store_errors(place):
                self.index, self.vouched = self._read_index(most)
        except BaseException:
            self.close()
            raise
        self._places: dict[str, tuple[int, Packed]] = {}
        self._documents = len(_MAGIC)
        for entry in self.index.packed:
            self._places[entry.use.digest] = self._documents, entry
            self._documents += entry.size

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give a copy's space back. Waits for a read of one artifact."""
        with self._reading:
            self._closed = True
            self._file.close()

    @property
    def digests(self) -> frozenset[str]:
        """The artifacts whose objects it has, without those that were found damaged."""
        return frozenset(self._places.keys() - self.damaged)

    def announced(self, digest: str) -> str | None:
        """The SHA-256 of the artifact's manifest, as READY would announce it; None if the pack lacks it."""
        found = None if self._closed or digest in self.damaged else self._places.get(digest)
        return None if found is None else found[1].manifest

    def fetch(self, digest: str, announced: str | None = None) -> tuple[Manifest, dict[str, bytes], str] | None:
        """As `Store.fetch`; None if the pack lacks it, or holds another. Raises `ArtifactInvalid`; the artifact is lacking
        then.
        """
        stated = self.announced(digest)
        if stated is None or announced not in (None, stated):
            return None
        try:
            found = self._object(digest, lambda encoded: self._store.trusted(self.place / digest, encoded, stated))
            return None if found is None else (found.manifest, found.contents(), stated)
        except ArtifactInvalid:
            self.damaged.add(digest)
            raise

    def verify(self, progress: Progress = lambda a, b: None) -> None:
        """Read and check every byte. Raises `PackInvalid`."""
        for _ in self.objects(progress):
            pass
        for _ in self.profiles():
            pass

    def objects(self, progress: Progress = lambda a, b: None) -> Iterator[StoredObject]:
        """Each object, every byte verified against the index, which vouches for it. Raises `PackInvalid`."""
        done = 0
        for entry in self.index.packed:
            digest = entry.use.digest

            def judge(encoded: bytes, entry: Packed = entry) -> Manifest:
                if manifest_digest(encoded) != entry.manifest:
                    raise ArtifactInvalid("it is not what the index states: copy the file again")
                manifest = Manifest.decode(encoded)
                if manifest.key.digest != entry.use.digest:
                    raise ArtifactInvalid("it is another key's")
                return manifest

            try:
                found = self._object(digest, judge)
                if found is None:
                    raise ArtifactInvalid("the file was closed")
                found.contents()
            except ArtifactInvalid as error:
                raise PackInvalid(f"{self.place}: the artifact {digest[:12]}: {error}") from error
            yield found
            done += entry.size
            progress(done, self.index.size)

    def profiles(self) -> Iterator[tuple[str, bytes]]:
        """Names and documents of the profiles. Raises `PackInvalid`."""
        position = self._documents
        for name, size, content in self.index.profiles:
            with self._reading, store_errors(self.place):
                self._file.seek(position)
                document = self._file.read(size)
            if sha256(document) != content:
                raise PackInvalid(f"{self.place}: the profile {name} is not what the index states: copy the file again")
            yield name, document
            position += size

    def _object(self, digest: str, judge: Callable[[bytes], Manifest]) -> StoredObject | None:
        """None if the pack is closed. Raises `ArtifactInvalid`."""
        position, entry = self._places[digest]
        with self._reading:
            if self._closed:
                return None
            try:
                self._file.seek(position)
                return read_object(self._file.read, entry.size, judge)
            except OSError as error:
                raise ArtifactInvalid(f"{self.place}: {error.strerror}") from error

    def _read_index(self, most: int) -> tuple[Index, bool]:
        found = os.fstat(self._file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise PackInvalid(f"{self.place}: it is no plain file")
        room = found.st_size - len(_MAGIC) - _LENGTH
        if room < 0 or self._file.read(len(_MAGIC)) != _MAGIC:
            raise PackInvalid(f"{self.place}: it is no file of 'kcoord export', or another version's: export it again")
        self._file.seek(found.st_size - _LENGTH)
        length = int.from_bytes(self._file.read(_LENGTH), "big")
        if length > min(self._largest_index, room):
            raise PackInvalid(f"{self.place}: it was cut, or has a huge index: copy it again")
        self._file.seek(found.st_size - _LENGTH - length)
        sealed, trust = self._file.read(length), self._store.trust
        try:
            doubt = trust.doubt(PACK, sealed) if trust.required else None
            if doubt is not None:
                unsigned = doubt.unknown_key or doubt.fault == UNSIGNED
                raise (PackDistrusted if unsigned else PackInvalid)(f"{doubt.fault}: {_REMEDY}")
            vouched = not trust.keys or trust.verifies(PACK, sealed)
            index = Index.decode(split(sealed)[0], most)
        except (ArtifactInvalid, PackInvalid) as error:
            kind = PackDistrusted if isinstance(error, PackDistrusted) else PackInvalid
            raise kind(f"{self.place}: {error}") from error
        if index.size != room - length:
            raise PackInvalid(
                f"{self.place}: it has {room - length} bytes, and its index states {index.size}: copy it again"
            )
        return index, vouched


def look_at_pack(store: Store, place: Path) -> Pack:
    """The pack in the store, without a copy of it: for its index. Raises `PackInvalid`."""
    try:
        return Pack(place, store, most=MOST_LISTED)
    except StoreError as error:
        raise PackInvalid(str(error)) from error


def read_pack(store: Store, profile: str, local_dir: Path) -> Pack | None:
    """Copy the pack to read for `profile` to the disk of `local_dir`, into a file without a name, which ends with this process.

    None if there is none. Raises `PackInvalid` for a pack that cannot be used, and where there is no room for it. Takes about
    half a minute at most, unless the store hangs.
    """
    for _ in range(2):  # it may be replaced between its listing and its opening
        try:
            path = newest_pack(store.root, profile, store.trust)
            if path is None:
                return None
            copy = _copied(path, local_dir)
            beneath.mark_used(path, store.root)
            return Pack(path, store, copy, most=MOST_LISTED)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, StoreError) as error:
            raise PackInvalid(str(error)) from error
    return None


def _copied(path: Path, local_dir: Path) -> BinaryIO:
    """A copy of the file at `path`. Raises OSError, `StoreError` and `PackInvalid`."""
    source = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(source)
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST_PACK:
            raise PackInvalid(f"{path}: it is no plain file of at most {LARGEST_PACK >> 20} MiB")
        with store_errors(local_dir):
            if not has_room(local_dir, _TIMES_ON_DISK * found.st_size):
                raise PackInvalid(f"{local_dir}: its disk has too little room for a pack of {found.st_size >> 20} MiB")
            copy = tempfile.TemporaryFile(dir=local_dir)  # noqa: SIM115 - its owner closes it
        try:
            _copy(source, copy, path, found.st_size)
        except BaseException:
            copy.close()
            raise
    finally:
        os.close(source)
    return copy


def _copy(source: int, copy: BinaryIO, path: Path, size: int) -> None:
    begun, left = time.monotonic(), size
    while left > 0 and (chunk := os.read(source, min(left, _CHUNK))):
        left -= len(chunk)
        copy.write(chunk)
        if time.monotonic() > begun + _READ_WITHIN:
            raise PackInvalid(f"{path}: the store is slow: {size - left:,} of {size:,} bytes in {_READ_WITHIN:g} s")
    copy.seek(0)


_REMEDY = (
    "let it be written by a holder of a key that is known here, or read it with KCOORD_TRUST=off if you know its origin"
)
