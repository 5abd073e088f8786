"""The payload: an artifact's files as one deterministic, compressed tar, whose size and SHA-256 the manifest states.

So a Triton kernel's seven files of mostly text take one short sequential read. Unpacking checks each file against the manifest,
and takes no more memory than the manifest states.
"""

from __future__ import annotations

import functools
import hashlib
import io
import tarfile
from collections.abc import Callable
from dataclasses import replace
from typing import BinaryIO

import zstandard

from kcoord.artifacts.manifest import PIECE, FileEntry, Manifest, Payload, check_content
from kcoord.cgroups import free_memory
from kcoord.errors import ArtifactInvalid, ArtifactUnreadable
from kcoord.units import bytes_text

_TAR_BLOCK = 512
_ZSTD_LEVEL = 3
_SMALL = 64 << 20  # bytes that an artifact may unpack to in any case
_MOST_TIMES = 1 << 15  # zstd makes 128 KiB of four bytes at most: a payload cannot unpack to more
_TIMES_IN_MEMORY = 2  # of the bytes of its files, while it is unpacked and checked


def check_sizes(manifest: Manifest) -> Payload:
    """The payload that `manifest` states, which is not read yet. Raises `ArtifactInvalid` if it states none, or one that would
    unpack to far more, and `ArtifactUnreadable` if this process has not enough free memory for both.
    """
    stated = manifest.payload
    if stated is None:
        raise ArtifactInvalid(f"the manifest of {manifest.key.name} states no payload")
    if manifest.size > _SMALL + _MOST_TIMES * stated.size:
        raise ArtifactInvalid(f"{manifest.key.name}: {stated.size} bytes would unpack to {manifest.size}")
    needed = stated.size + memory_of(manifest)
    if needed > _SMALL and needed > free_memory():
        raise ArtifactUnreadable(
            f"{manifest.key.name}: {bytes_text(needed)} of memory would be needed, more than is free"
        )
    return stated


def memory_of(manifest: Manifest) -> int:
    """Bytes of memory that `unpack` takes, besides the payload."""
    return _TIMES_IN_MEMORY * manifest.size


def pack(manifest: Manifest, contents: dict[str, bytes]) -> bytes:
    """All files as one zstd-compressed tar; equal files give equal bytes (with one version of zstd)."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in manifest.files:
            member = tarfile.TarInfo(entry.name)
            member.size, member.mode, member.mtime = entry.size, 0o644, 0
            tar.addfile(member, io.BytesIO(contents[entry.name]))
    return bytes(zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True).compress(buffer.getvalue()))


def pack_into(file: BinaryIO, manifest: Manifest, opened: Callable[[FileEntry], BinaryIO]) -> Payload:
    """As `pack`, piece by piece: the portable content of each file is read from ``opened(entry)``, and checked.

    Raises `ArtifactInvalid`, and OSError of both sides.
    """
    sent = _Hashed(file)
    compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL, write_checksum=True)
    with (
        compressor.stream_writer(sent, closefd=False) as stream,  # type: ignore[arg-type]
        tarfile.open(fileobj=stream, mode="w|", format=tarfile.PAX_FORMAT, bufsize=PIECE) as tar,
    ):
        tar.copybufsize = PIECE  # type: ignore[attr-defined]
        for entry in manifest.files:
            member = tarfile.TarInfo(entry.name)
            member.size, member.mode, member.mtime = entry.size, 0o644, 0
            with opened(entry) as content:
                tar.addfile(member, _Checked(entry, content))  # type: ignore[arg-type]
    return Payload(sent.size, sent.digest.hexdigest())


class _Hashed:
    """Passes on what is written to it."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.digest, self.size = file, hashlib.sha256(), 0

    def write(self, piece: bytes) -> int:
        self.digest.update(piece)
        self.size += len(piece)
        return self._file.write(piece)


class _Checked:
    """The content of `entry`, as it is read. Raises `ArtifactInvalid` if the file ends early, holds other bytes, or cannot be
    read: this node's disk is no fault of the store.
    """

    def __init__(self, entry: FileEntry, file: BinaryIO) -> None:
        self._entry, self._file, self._digest, self._left = entry, file, hashlib.sha256(), entry.size

    def read(self, size: int) -> bytes:
        name = self._entry.name
        try:
            piece = self._file.read(size)
        except OSError as error:
            raise ArtifactUnreadable(f"{name} cannot be read: {error}") from error
        self._digest.update(piece)
        self._left -= len(piece)
        if len(piece) < size or (not self._left and self._digest.hexdigest() != self._entry.sha256):
            raise ArtifactInvalid(f"{name} does not have the size and the SHA-256 of its manifest")
        return piece


def unpack(manifest: Manifest, payload: bytes) -> dict[str, bytes]:
    """The checked contents of a payload, by name. Raises `ArtifactInvalid`; memory stays within the stated sizes."""
    stated = manifest.payload
    if stated is None or len(payload) != stated.size or hashlib.sha256(payload).hexdigest() != stated.sha256:
        raise ArtifactInvalid(f"the payload of {manifest.key.name} is not the one that its manifest states")
    entries = {f.name: f for f in manifest.files}
    # each member has a header, perhaps an extended one of a few blocks, and its content in whole blocks
    most = sum(f.size + 16 * _TAR_BLOCK + 2 * len(f.name) for f in manifest.files) + 40 * _TAR_BLOCK
    contents: dict[str, bytes] = {}
    try:
        plain = _Bounded(payload, most)
        with plain.stream, tarfile.open(fileobj=plain, mode="r|", bufsize=PIECE) as tar:  # type: ignore[call-overload]
            for member in tar:
                entry = entries.get(member.name)
                plain_file = member.type == tarfile.REGTYPE and not member.issparse()
                if entry is None or not plain_file or member.name in contents or member.size != entry.size:
                    raise ArtifactInvalid(f"the payload holds {member.name!r}, which the manifest does not state")
                file = tar.extractfile(member)
                contents[member.name] = b"".join(iter(functools.partial(file.read, PIECE), b"")) if file else b""
                check_content(entry, contents[member.name])
            while plain.read(PIECE):
                pass
    except (tarfile.TarError, zstandard.ZstdError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise ArtifactInvalid(f"the payload of {manifest.key.name} cannot be unpacked: {error}") from error
    if contents.keys() != entries.keys():
        raise ArtifactInvalid(f"the payload lacks {', '.join(sorted(entries.keys() - contents.keys()))}")
    return contents


def with_payload(manifest: Manifest, payload: bytes) -> Manifest:
    return replace(manifest, payload=payload_of(payload))


def payload_of(payload: bytes) -> Payload:
    return Payload(len(payload), hashlib.sha256(payload).hexdigest())


class _Bounded:
    """The decompressed payload, piece by piece, of at most `most` bytes."""

    def __init__(self, payload: bytes, most: int) -> None:
        self.stream = zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(payload)
        self._left = most

    def read(self, size: int) -> bytes:
        # the stream allocates the size that it is asked for
        piece = self.stream.read(min(size, PIECE, self._left + 1))
        self._left -= len(piece)
        if self._left < 0:
            raise ArtifactInvalid("the payload unpacks to more than its manifest states")
        return piece
