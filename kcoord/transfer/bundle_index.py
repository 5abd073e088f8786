"""A bundle's index: its artifacts and profiles, with the size and SHA-256 of each file.

Not trusted: `Index.decode` judges every name and number before anything else of a bundle is read.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Any

import msgpack

from kcoord.artifacts.manifest import LARGEST_ARTIFACT, LARGEST_MANIFEST
from kcoord.errors import KcoordError
from kcoord.settings import profile_name

_LARGEST_PROFILE = 256 << 20  # bytes
_FORMAT = 1
_LONGEST = 1024  # bytes of a text
_DIGEST = re.compile(r"[0-9a-f]{64}")


class BundleInvalid(KcoordError):
    """A file is no bundle, or not whole, or does not verify. Nothing of it was imported."""


@dataclass(frozen=True)
class Blob:
    """One file's size in bytes, and its SHA-256."""

    size: int
    sha256: str

    @classmethod
    def of(cls, content: bytes) -> Blob:
        return cls(len(content), hashlib.sha256(content).hexdigest())

    @classmethod
    def parse(cls, size: Any, sha256: Any, most: int) -> Blob:
        """Raises ValueError, also if it is larger than `most`."""
        if type(size) is not int or not 0 <= size <= most:
            raise ValueError(f"{size!r:.40} is no size from 0 to {most} bytes")
        if not isinstance(sha256, str) or not _DIGEST.fullmatch(sha256):
            raise ValueError("a SHA-256 is not 64 hexadecimal digits")
        return cls(size, sha256)


@dataclass(frozen=True)
class Packed:
    """An artifact: its key's digest, and its two files."""

    digest: str
    manifest: Blob
    payload: Blob


@dataclass(frozen=True)
class Index:
    """A bundle's artifacts by digest, and its documents of profiles by name, both sorted."""

    artifacts: tuple[Packed, ...]
    profiles: tuple[tuple[str, Blob], ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all blobs."""
        return sum(p.manifest.size + p.payload.size for p in self.artifacts) + sum(b.size for _, b in self.profiles)

    def encode(self) -> bytes:
        document: dict[str, Any] = {
            "format": _FORMAT,
            "artifacts": [
                [p.digest, p.manifest.size, p.manifest.sha256, p.payload.size, p.payload.sha256] for p in self.artifacts
            ],
            "profiles": [[name, blob.size, blob.sha256] for name, blob in self.profiles],
        }
        return bytes(msgpack.packb(document))

    @classmethod
    def decode(cls, data: bytes) -> Index:
        """Raises `BundleInvalid` for a name or a number that is not allowed."""
        try:
            artifacts, profiles = _Reader(data).read()
            for names in ([p.digest for p in artifacts], [name for name, _ in profiles]):
                if names != sorted(set(names)):
                    raise ValueError("its index is not sorted, or names something twice")
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise BundleInvalid(f"this is no bundle that can be read: {error}") from error
        return cls(artifacts, profiles)


class _Reader:
    """Judges each number and name as it is decoded: an index that nobody signed takes little more memory than its bytes."""

    def __init__(self, data: bytes) -> None:
        self._end = len(data)
        self._reader = msgpack.Unpacker(
            max_buffer_size=max(1, len(data)), max_array_len=0, max_map_len=0, max_ext_len=0, max_bin_len=0,
            max_str_len=_LONGEST,
        )  # fmt: skip
        self._reader.feed(data)

    def read(self) -> tuple[tuple[Packed, ...], tuple[tuple[str, Blob], ...]]:
        """The artifacts and the profiles, in the order in which `Index.encode` writes them."""
        fields = self._reader.read_map_header()
        self._field("format")
        if (found := self._reader.unpack()) != _FORMAT:
            raise ValueError(f"its format {found!r:.40} is not {_FORMAT}")
        self._field("artifacts")
        artifacts = tuple(_packed(*self._values(5)) for _ in range(self._reader.read_array_header()))
        self._field("profiles")
        profiles = tuple(_profile(*self._values(3)) for _ in range(self._reader.read_array_header()))
        if fields != 3:
            raise ValueError("its index has other fields")
        if self._reader.tell() != self._end:
            raise ValueError("something follows its index")
        return artifacts, profiles

    def _field(self, name: str) -> None:
        if self._reader.unpack() != name:
            raise ValueError("its index has other fields")

    def _values(self, length: int) -> list[Any]:
        if self._reader.read_array_header() != length:
            raise ValueError("its index has an entry of another length")
        return [self._reader.unpack() for _ in range(length)]


def _packed(digest: Any, size: Any, sha256: Any, payload_size: Any, payload_sha256: Any) -> Packed:
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r:.80} is no digest of a key")
    manifest = Blob.parse(size, sha256, LARGEST_MANIFEST)
    return Packed(digest, manifest, Blob.parse(payload_size, payload_sha256, LARGEST_ARTIFACT))


def _profile(name: Any, size: Any, sha256: Any) -> tuple[str, Blob]:
    if not isinstance(name, str):
        raise TypeError("a profile's name is no text")
    try:
        return profile_name(name), Blob.parse(size, sha256, _LARGEST_PROFILE)
    except ValueError as error:
        raise ValueError(f"no profile is called {name!r:.80}: {error}") from None
