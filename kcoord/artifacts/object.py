"""The object: an artifact as one file, in the store and in packs.

======================= ==================================================================
``kcoord-object-2\\n``   16 bytes
two sizes               of the manifest (4 bytes) and of the payload (8), big-endian
the manifest            `kcoord.artifacts.manifest`, in its envelope if it is signed
the payload             the files' bytes in the manifest's order, compressed by zstd
======================= ==================================================================

The manifest alone says where each file ends. Equal manifests and files make equal bytes, with one version of zstd.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import zstandard

from kcoord.artifacts.manifest import (
    LARGEST_ARTIFACT,
    LARGEST_MANIFEST,
    PIECE,
    Contents,
    FileEntry,
    Manifest,
    check_content,
    checked_pieces,
)
from kcoord.cgroups import free_memory
from kcoord.errors import ArtifactInvalid, ArtifactUnreadable
from kcoord.units import bytes_text

_MAGIC = b"kcoord-object-2\n"
_SIZES = struct.Struct(">IQ")
_HEAD = len(_MAGIC) + _SIZES.size
LARGEST_OBJECT = _HEAD + LARGEST_MANIFEST + LARGEST_ARTIFACT + (LARGEST_ARTIFACT >> 6)
"""Bytes that no object exceeds."""
_ZSTD_LEVEL = 3
_LARGEST_WINDOW = 1 << 23  # bytes of memory that a payload may ask its decompressor for; ours ask for 2 MiB
_SMALL = 64 << 20  # bytes that an artifact may unpack to in any case
_MOST_TIMES = 1 << 15  # zstd makes 128 KiB of four bytes at most: a payload cannot unpack to more
_TIMES_IN_MEMORY = 2  # of the bytes of its files, while it is unpacked and checked

Read = Callable[[int], bytes]
"""``read(size)``: the next bytes, fewer at the end only, as a file's. Raises OSError."""


@dataclass(frozen=True)
class StoredObject:
    """An object that was read. `manifest` is decoded from the bytes `encoded`; the payload is not unpacked yet."""

    manifest: Manifest
    encoded: bytes
    payload: bytes

    @property
    def size(self) -> int:
        return _HEAD + len(self.encoded) + len(self.payload)

    def pieces(self) -> tuple[bytes, bytes, bytes]:
        """The object's bytes."""
        return _head(len(self.encoded), len(self.payload)), self.encoded, self.payload

    def contents(self) -> dict[str, bytes]:
        """The checked files, by name. Raises `ArtifactInvalid`; memory stays within the sizes that the manifest states."""
        found: dict[str, bytes] = {}
        try:
            plain = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(
                self.payload, read_across_frames=True
            )
            with plain:
                for entry in self.manifest.files:
                    found[entry.name] = b"".join(_pieces(plain.read, entry.size))
                    check_content(entry, found[entry.name])
                if plain.read(1):
                    raise ArtifactInvalid("the payload unpacks to more than its manifest states")
        except zstandard.ZstdError as error:
            raise ArtifactInvalid(f"the payload of {self.manifest.key.name} cannot be unpacked: {error}") from error
        return found


def write_object(file: BinaryIO, manifest: Manifest, encoded: bytes, contents: Contents) -> None:
    """Write the object of `manifest`, whose bytes are `encoded`, to an empty `file`, in pieces.

    `contents` are the portable files: in a dict, verified already, or opened one by one, and verified on their way. Raises
    `ArtifactInvalid` for files other than the manifest's, and OSError of `file`.
    """
    file.write(_head(len(encoded), 0))
    file.write(encoded)
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
    with compressor.stream_writer(file, closefd=False) as stream:
        for entry in manifest.files:
            for piece in _content(entry, contents):
                stream.write(piece)
    payload = file.tell() - _HEAD - len(encoded)
    file.seek(0)
    file.write(_head(len(encoded), payload))


def read_manifest(read: Read, size: int, first: int = 16 << 10) -> tuple[bytes, bytes, int]:
    """The manifest's bytes of an object of `size` bytes, those of the payload that were read with them, and the payload's size.

    The first read is of `first` bytes. Nothing is verified but the sizes. Raises `ArtifactInvalid`, and OSError.
    """
    content = read(min(size, max(first, _HEAD)))
    if len(content) < _HEAD or not content.startswith(_MAGIC):
        raise ArtifactInvalid("it is no object of this version")
    manifest, payload = _SIZES.unpack_from(content, len(_MAGIC))
    start = _HEAD + manifest
    if manifest > LARGEST_MANIFEST or start + payload != size:
        raise ArtifactInvalid(f"its {size} bytes are not those that its header states")
    if len(content) < start:
        content += read(start - len(content))
    return content[_HEAD:start], content[start:], payload


def read_object(read: Read, size: int, judge: Callable[[bytes], Manifest]) -> StoredObject:
    """Read an object of `size` bytes. ``judge(encoded)`` decodes the manifest, or raises `ArtifactInvalid`.

    It is asked before anything that the manifest states is obeyed. Nothing of the payload is verified: see
    `StoredObject.contents`. Raises `ArtifactInvalid`; `ArtifactUnreadable` if this process has too little memory; and OSError.
    """
    encoded, begun, payload = read_manifest(read, size, PIECE)
    manifest = judge(encoded)
    check_sizes(manifest, payload)
    rest = payload - len(begun)
    whole = StoredObject(manifest, encoded, begun + read(rest) if rest else begun)
    if len(whole.payload) != payload:
        raise ArtifactInvalid("it ends before its payload does")
    return whole


def _head(manifest: int, payload: int) -> bytes:
    return _MAGIC + _SIZES.pack(manifest, payload)


def check_sizes(manifest: Manifest, payload: int) -> None:
    """Raises `ArtifactInvalid` if a payload of so many bytes cannot hold the files that `manifest` states, and
    `ArtifactUnreadable` if this process has not enough free memory for both.
    """
    if manifest.size > _SMALL + _MOST_TIMES * payload:
        raise ArtifactInvalid(f"{manifest.key.name}: {payload} bytes would unpack to {manifest.size}")
    if (
        payload > manifest.size + (manifest.size >> 7) + 512
    ):  # zstd adds 3 bytes to each 128 KiB that it cannot compress
        raise ArtifactInvalid(
            f"{manifest.key.name}: a payload of {payload} bytes is too large for files of {manifest.size}"
        )
    needed = payload + _TIMES_IN_MEMORY * manifest.size
    if needed > _SMALL and needed > free_memory():
        raise ArtifactUnreadable(
            f"{manifest.key.name}: {bytes_text(needed)} of memory would be needed, more than is free"
        )


def _content(entry: FileEntry, contents: Contents) -> Iterator[bytes]:
    if not callable(contents):
        yield contents[entry.name]
        return
    with contents(entry) as file:
        try:
            yield from checked_pieces(entry, file)
        except OSError as error:  # this node's disk is no fault of the store's
            raise ArtifactUnreadable(f"{entry.name} cannot be read: {error}") from error


def _pieces(read: Read, size: int) -> Iterator[bytes]:
    """The next `size` bytes of what a payload unpacks to; a reader of zstd allocates what it is asked for."""
    while size > 0:
        piece = read(min(size, PIECE))
        if not piece:
            raise ArtifactInvalid("the payload unpacks to less than its manifest states")
        size -= len(piece)
        yield piece
