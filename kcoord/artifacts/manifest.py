"""The manifest: an artifact's key, files and origin.

It is written last, so a directory with a manifest is whole. A manifest is untrusted until `Manifest.decode` has accepted
it: then names are relative and plain, and sizes are bounded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import reprlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgpack

from kcoord.artifacts.needs import NEED
from kcoord.artifacts.signing import OVERHEAD, split
from kcoord.errors import ArtifactInvalid
from kcoord.files.reading import read_plain, unpack
from kcoord.keys.cache_key import CacheKey, Factor

MANIFEST_NAME = "kcoord-manifest.msgpack"
FORMAT = 1
HOME_PLACEHOLDER = b"@KCOORD_HOME@"
"""In a relocatable file, stands for the artifact's directory, as JSON would escape it."""

_LARGEST_BARE = 4 << 20  # bytes
_MOST_VALUES = 256 << 10  # names, sizes, hashes, factors
LARGEST_MANIFEST = _LARGEST_BARE + OVERHEAD  # in its envelope
LARGEST_ARTIFACT = 16 << 30
LARGEST_IN_MEMORY = 64 << 20
"""Bytes of an artifact that is read as a whole. A larger one is hashed, sent on and copied piece by piece: else it would take its
size in memory, and each copy in there would silence the whole process for seconds."""
PIECE = 1 << 20
_MOST_FILES = 10_000
_LONGEST_NAME = 1024  # characters
_DEEPEST = 32  # directories
_MOST_TARGETS = 100
MOST_NEEDS = 4096
_ANY = -1e19, 1e19  # msgpack's whole numbers are below


class FileEntry(NamedTuple):
    """One file: name relative to the artifact's directory, size in bytes, SHA-256 in hex.

    A relocatable file names its own directory; size and hash are those of its text with `HOME_PLACEHOLDER`.
    """

    name: str
    size: int
    sha256: str
    relocatable: bool = False


Contents = dict[str, bytes] | Callable[[FileEntry], BinaryIO]
"""An artifact's files as they travel, by name; or, of a large one, what opens each to be read piece by piece."""


class Origin(NamedTuple):
    """The process that compiled, its device, and the time (Unix seconds)."""

    host: str = ""
    pid: int = 0
    rank: int | None = None
    device: str = ""
    created: float = 0.0

    @classmethod
    def here(cls, pid: int, rank: int | None, device: str) -> Origin:
        return cls(platform.node(), pid, rank, device, time.time())


@dataclass(frozen=True)
class Manifest:
    """An artifact's description. `compile_seconds` is the duration of its compile, which a hit saves.

    `targets` are the GPUs that the files themselves name, as ``cuda:90``; empty if they name none. `needs`: see
    `kcoord.artifacts.needs`.
    `made_here`: on a node, its own ranks compiled it. No manifest of a store has it, whatever it states.
    A decoded manifest's key has no details, which only people read: they stay packed until `explained` is called.
    """

    key: CacheKey
    files: tuple[FileEntry, ...]
    compile_seconds: float
    origin: Origin
    details: bytes = b""
    targets: tuple[str, ...] = ()
    made_here: bool = False
    needs: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(f.size for f in self.files)

    @property
    def explained(self) -> CacheKey:
        """The key with its details. Raises `ArtifactInvalid` if they cannot be decoded."""
        if not self.details:
            return self.key
        try:
            details = tuple(Factor.from_wire(f) for f in unpack(self.details, _MOST_VALUES))
        except (ValueError, TypeError) as error:
            raise ArtifactInvalid(f"the details of {self.key.name} cannot be read: {error}") from error
        return replace(self.key, details=details)

    def encode(self) -> bytes:
        """Raises `ArtifactInvalid` if a name is not UTF-8."""
        try:
            details = (
                bytes(msgpack.packb([d.to_wire() for d in self.key.details])) if self.key.details else self.details
            )
            return bytes(msgpack.packb(self._document(details)))
        except UnicodeEncodeError as error:
            raise ArtifactInvalid(f"{self.key.name}: a name in its manifest is not UTF-8: {error.object!r}") from error

    def _document(self, details: bytes) -> dict[str, Any]:
        document: dict[str, Any] = {
            "format": FORMAT,
            "digest": self.key.digest,
            "key": replace(self.key, details=()).to_wire(),
            "details": details,
            "files": self.files,
            "compile_seconds": self.compile_seconds,
            "origin": self.origin,
            "targets": list(self.targets),
        }
        if self.made_here:
            document["made_here"] = True
        if self.needs:
            document["needs"] = list(self.needs)
        return document

    @classmethod
    def decode(cls, data: bytes) -> Manifest:
        """Decode a manifest, also one in a signed envelope. Raises `ArtifactInvalid` unless all names and numbers are in bounds.

        The signature is not verified: `kcoord.artifacts.signing.Trust.doubt` does that.
        """
        data, _ = split(data)
        try:
            if len(data) > _LARGEST_BARE:
                raise ValueError(f"{len(data)} bytes are too many")
            document = unpack(data, _MOST_VALUES)
            if document["format"] != FORMAT:
                raise ValueError(f"format {_shown(document['format'])} is not {FORMAT}")
            manifest = cls._from_document(document)
            if manifest.key.digest != document["digest"]:
                raise ValueError("its key does not have the digest that it states")
        except (
            *(ValueError, TypeError, LookupError, ArithmeticError, AttributeError),
            RecursionError,  # a deeply nested value, when it is printed
        ) as error:
            raise ArtifactInvalid(f"not a manifest: {error}") from error
        return manifest

    @classmethod
    def read(cls, home: Path) -> Manifest:
        """Of the artifact at `home`, in the local tier. Raises `ArtifactInvalid` as `decode` does, and OSError."""
        return cls.decode(read_plain(home / MANIFEST_NAME, LARGEST_MANIFEST))

    @classmethod
    def _from_document(cls, document: dict[str, Any]) -> Manifest:
        files = tuple(_file(*entry) for entry in document["files"])
        _check_names(files)
        host, pid, rank, device, created = document["origin"]
        return cls(
            key=CacheKey.from_wire(document["key"]),
            files=files,
            compile_seconds=float(_number(document["compile_seconds"], (int, float), 0, 1e9)),
            origin=Origin(
                str(host),
                _number(pid, int, *_ANY),
                None if rank is None else _number(rank, int, *_ANY),
                str(device),
                float(_number(created, (int, float), *_ANY)),  # a host's clock may be years off
            ),
            details=_bytes(document["details"]),
            targets=_texts(document["targets"], _MOST_TARGETS),
            made_here=document.get("made_here") is True,
            needs=_needs(document.get("needs", [])),
        )


def _bytes(value: Any) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} is not bytes")
    return value


def _texts(value: Any, most: int) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > most or not all(isinstance(text, str) for text in value):
        raise TypeError(f"{_shown(value)} is no list of at most {most} texts")
    return tuple(value)


def _needs(value: Any) -> tuple[str, ...]:
    """The dynamic linker is asked for the names in them."""
    found = _texts(value, MOST_NEEDS)
    if not all(map(NEED.fullmatch, found)):
        raise ValueError(f"{_shown(value)} holds texts that are no needs")
    return found


def _file(name: Any, size: Any, sha256: Any, relocatable: Any) -> FileEntry:
    if not isinstance(name, str) or not isinstance(relocatable, bool):
        raise TypeError("a file is a name, a size, a hash and a flag")
    return FileEntry(name, _number(size, int, 0, LARGEST_ARTIFACT), _sha256(sha256), relocatable)


def _number(value: Any, kinds: Any, least: float, most: float) -> Any:
    """Raises ValueError for a value of another kind, or out of bounds, as a NaN is."""
    if not isinstance(value, kinds) or not least <= value <= most:
        raise ValueError(f"{_shown(value)} is no number from {least:g} to {most:g}")
    return value


def _sha256(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 64 or not set(value) <= set("0123456789abcdef"):
        raise ValueError(f"{_shown(value)} is no SHA-256")
    return value


def _check_names(files: tuple[FileEntry, ...]) -> None:
    names = [f.name for f in files]
    if len(names) > _MOST_FILES or sum(f.size for f in files) > LARGEST_ARTIFACT:
        raise ValueError("too many files, or too large")
    unique = set(names)
    if names != sorted(unique):
        raise ValueError("names are not sorted, or not unique")
    for name in names:
        if len(name) > _LONGEST_NAME or name.count("/") > _DEEPEST:  # first: what follows looks at each directory
            raise ValueError(f"{_shown(name)} is too long, or too deep")
        parts = name.split("/")
        if not name or name == MANIFEST_NAME or "\0" in name or any(p in ("", ".", "..") for p in parts):
            raise ValueError(f"{_shown(name)} is not a plain relative name")
        if any("/".join(parts[:n]) in unique for n in range(1, len(parts))):
            raise ValueError(f"{_shown(name)} lies below a file")


_shown = reprlib.repr  # beginning and end of a value that may be huge


def home_token(home: Path) -> bytes:
    """The text that replaces `HOME_PLACEHOLDER` in the relocatable files of an artifact at `home`."""
    text = os.fsencode(home)
    return text.replace(b"\\", b"\\\\").replace(b'"', b'\\"')


def portable(entry: FileEntry, content: bytes, home: Path) -> bytes:
    """A file's content as it is hashed and sent: a relocatable one with `HOME_PLACEHOLDER` for its directory's name."""
    return content.replace(home_token(home), HOME_PLACEHOLDER) if entry.relocatable else content


def largest_at_home(entry: FileEntry, home: Path) -> int:
    """The most bytes of the file at `home`, where a relocatable one names its directory, perhaps many times."""
    times = entry.size // len(HOME_PLACEHOLDER) if entry.relocatable else 0
    return entry.size + times * max(0, len(home_token(home)) - len(HOME_PLACEHOLDER))


def checked_pieces(entry: FileEntry, file: BinaryIO) -> Iterator[bytes]:
    """The portable content of `file`, piece by piece. Raises `ArtifactInvalid` at its end, as `check_content` does."""
    digest, size = hashlib.sha256(), 0
    while piece := file.read(PIECE):
        digest.update(piece)
        size += len(piece)
        yield piece
    if (size, digest.hexdigest()) != (entry.size, entry.sha256):
        raise ArtifactInvalid(f"{entry.name} does not have the size and the SHA-256 of its manifest")


def check_content(entry: FileEntry, content: bytes) -> None:
    """Raises `ArtifactInvalid` unless portable `content` has the size and hash that the manifest states."""
    if len(content) != entry.size:
        raise ArtifactInvalid(f"{entry.name} has {len(content)} bytes, not {entry.size}")
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise ArtifactInvalid(f"{entry.name} does not have the SHA-256 of its manifest")
