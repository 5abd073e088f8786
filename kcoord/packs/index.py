"""A pack's index: every artifact that its jobs used, with its place on a node and the day of its last use, and its profiles.

Not trusted: `Index.decode` judges every name and number before anything else of a pack is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack

from kcoord.artifacts.object import LARGEST_OBJECT
from kcoord.errors import KcoordError
from kcoord.settings import profile_name

T = TypeVar("T")

MOST_LISTED = 100_000  # artifacts of a profile's pack
ANY_NUMBER = 1 << 31
_FORMAT = 1
_LARGEST_PROFILE = 256 << 20  # bytes
_MOST_PROFILES = 10_000
_LONGEST = 1024  # bytes of a text
_HASH = 32  # bytes
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PLACE = re.compile(
    r"(?!objects/|packs/|profiles/|profiles-unsigned/|stats/|toolchain/|traces/)[a-z0-9][a-z0-9_-]{0,63}/[A-Za-z0-9_=-]{1,200}"
    r"|objects/[0-9a-f]{2}/[0-9a-f]{64}"
)
"""A compiler's tier or kcoord's; nothing else of the local directory."""


class PackInvalid(KcoordError):
    """A file is no pack, or not whole, or does not verify, or cannot be used here."""


class PackDistrusted(PackInvalid):
    """A pack that may be whole, and that none of our keys has signed."""


@dataclass(frozen=True, slots=True)
class Use:
    """An artifact that jobs used: the digest of its key, its place below the local directory (empty: nowhere that another node
    would look), and the day of its last use, counted from 1970.

    Raises ValueError for anything else. Nothing is put at `place` unless the artifact's own key says the same.
    """

    digest: str
    place: str = ""
    day: int = 0

    def __post_init__(self) -> None:
        if not is_digest(self.digest):
            raise ValueError(f"{self.digest!r:.80} is no digest")
        if not is_place(self.place) and self.place != "":
            raise ValueError(f"{self.place!r:.80} is no place in the local directory")
        if type(self.day) is not int or not 0 <= self.day < 1 << 32:
            raise ValueError(f"{self.day!r:.40} is no day")


@dataclass(frozen=True, slots=True)
class Packed:
    """An artifact whose object is in the pack: the object's size in bytes, and the SHA-256 of its manifest."""

    use: Use
    size: int
    manifest: str


@dataclass(frozen=True)
class Index:
    """The artifacts whose objects the pack has, in the order of the file; those that it lists without; and its profiles, each
    with the size of its document in bytes, and the SHA-256.
    """

    packed: tuple[Packed, ...] = ()
    listed: tuple[Use, ...] = ()
    profiles: tuple[tuple[str, int, str], ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all objects and documents."""
        return sum(p.size for p in self.packed) + sum(size for _, size, _ in self.profiles)

    @property
    def uses(self) -> list[Use]:
        return [*(p.use for p in self.packed), *self.listed]

    @property
    def digest(self) -> str:
        """The SHA-256 of all of it."""
        return sha256(self.encode())

    def encode(self) -> bytes:
        packed = [[*_use_to_wire(p.use), p.size, bytes.fromhex(p.manifest)] for p in self.packed]
        profiles = [[name, size, bytes.fromhex(sha256)] for name, size, sha256 in self.profiles]
        return bytes(msgpack.packb([_FORMAT, packed, [_use_to_wire(use) for use in self.listed], profiles]))

    @classmethod
    def decode(cls, data: bytes, most: int = ANY_NUMBER) -> Index:
        """Raises `PackInvalid` for a name or a number that is not allowed, and for more than `most` artifacts.

        Each is judged as it is decoded: an index that nobody signed takes little more memory than its bytes.
        """
        reader = msgpack.Unpacker(
            max_buffer_size=max(1, len(data)), max_array_len=0, max_map_len=0, max_ext_len=0, max_bin_len=_HASH,
            max_str_len=_LONGEST,
        )  # fmt: skip
        reader.feed(data)
        try:
            _length(reader, 4)
            if (found := reader.unpack()) != _FORMAT:
                raise ValueError(f"its format {found!r:.40} is not {_FORMAT}")
            packed = _rows(reader, most, 5, _packed)
            listed = _rows(reader, most - len(packed), 3, _use)
            profiles = _rows(reader, _MOST_PROFILES, 3, _profile)
            if reader.tell() != len(data):
                raise ValueError("something follows its index")
            index = cls(packed, listed, profiles)
            for names in ([use.digest for use in index.uses], [name for name, _, _ in profiles]):
                if len(set(names)) != len(names):
                    raise ValueError("its index names something twice")
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise PackInvalid(f"this is no pack that can be read: {error}") from error
        return index


def is_digest(text: Any) -> bool:
    return isinstance(text, str) and _DIGEST.fullmatch(text) is not None


def is_place(text: Any) -> bool:
    """True for a place of an artifact below the local directory."""
    return isinstance(text, str) and _PLACE.fullmatch(text) is not None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _use_to_wire(use: Use) -> list[Any]:
    usual = f"objects/{use.digest[:2]}/{use.digest}"
    return [bytes.fromhex(use.digest), "objects" if use.place == usual else use.place, use.day]


def _length(reader: msgpack.Unpacker, length: int) -> None:
    if reader.read_array_header() != length:
        raise ValueError("its index has an entry of another length")


def _rows(reader: msgpack.Unpacker, most: int, fields: int, parse: Callable[..., T]) -> tuple[T, ...]:
    count = reader.read_array_header()
    if count > most:
        raise ValueError(f"its index has {count} entries, of {most} at most")

    def row() -> T:
        _length(reader, fields)
        return parse(*(reader.unpack() for _ in range(fields)))

    return tuple(row() for _ in range(count))


def _use(digest: Any, place: Any, day: Any) -> Use:
    digest = _hash(digest)
    return Use(digest, f"objects/{digest[:2]}/{digest}" if place == "objects" else place, day)


def _packed(digest: Any, place: Any, day: Any, size: Any, manifest: Any) -> Packed:
    return Packed(_use(digest, place, day), _size(size, LARGEST_OBJECT), _hash(manifest))


def _profile(name: Any, size: Any, content: Any) -> tuple[str, int, str]:
    if not isinstance(name, str):
        raise TypeError("a profile's name is no text")
    try:
        profile_name(name)
    except ValueError as error:
        raise ValueError(f"no profile is called {name!r:.80}: {error}") from None
    return name, _size(size, _LARGEST_PROFILE), _hash(content)


def _hash(value: Any) -> str:
    if not isinstance(value, bytes) or len(value) != _HASH:
        raise ValueError(f"{value!r:.80} is no SHA-256")
    return value.hex()


def _size(value: Any, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is no size from 0 to {most} bytes")
    return value
