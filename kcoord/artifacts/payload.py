"""The payload: an artifact's files as one deterministic, compressed tar, whose size and SHA-256 the manifest states.

So a Triton kernel's seven files of mostly text take one short sequential read. Unpacking checks each file against the manifest,
and takes no more memory than the manifest states.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace

import zstandard

from kcoord.artifacts.manifest import Manifest, Payload, check_content
from kcoord.cgroups import free_memory
from kcoord.errors import ArtifactInvalid, ArtifactUnreadable
from kcoord.units import bytes_text

_TAR_BLOCK = 512
_ZSTD_LEVEL = 3
_CHUNK = 1 << 20
_SMALL, _MOST_TIMES = 64 << 20, 1000  # an artifact unpacks to so many bytes, and so many times its payload, at most
_TIMES_IN_MEMORY = 3  # of the bytes of its files, while it is unpacked and checked


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
        plain = _decompress(payload, most)
        with tarfile.open(fileobj=io.BytesIO(plain), mode="r:") as tar:
            for member in tar:
                entry = entries.get(member.name)
                plain_file = member.type == tarfile.REGTYPE and not member.issparse()
                if entry is None or not plain_file or member.name in contents or member.size != entry.size:
                    raise ArtifactInvalid(f"the payload holds {member.name!r}, which the manifest does not state")
                file = tar.extractfile(member)
                contents[member.name] = file.read() if file else b""
                check_content(entry, contents[member.name])
    except (tarfile.TarError, zstandard.ZstdError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise ArtifactInvalid(f"the payload of {manifest.key.name} cannot be unpacked: {error}") from error
    if contents.keys() != entries.keys():
        raise ArtifactInvalid(f"the payload lacks {', '.join(sorted(entries.keys() - contents.keys()))}")
    return contents


def with_payload(manifest: Manifest, payload: bytes) -> Manifest:
    stated = Payload(len(payload), hashlib.sha256(payload).hexdigest())
    return replace(manifest, payload=stated)


def _decompress(payload: bytes, most: int) -> bytes:
    with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(payload) as reader:
        plain = bytearray()
        # `read` allocates the size that it is asked for
        while chunk := reader.read(min(_CHUNK, most + 1 - len(plain))):
            plain += chunk
    if len(plain) > most:
        raise ArtifactInvalid("the payload unpacks to more than its manifest states")
    return bytes(plain)
