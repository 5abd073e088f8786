"""Signatures (Ed25519) of artifacts, profiles and packs, and the file of their keys.

A user who can write to the store can put code there that ranks load. Agents therefore sign what they publish: an artifact's
manifest, which states the SHA-256 of the other files, each part of a profile, and a pack's index. A signed file is an
*envelope*: the content, the key's id and the signature. A private key signs and verifies; a public key verifies alone, so that a
node that is broken into cannot sign for the others.

A valid signature proves that *one* holder of the private key signed, not which one. Not guaranteed: that the newest signed
content is there; an older artifact of the same key is as good.

The package ``cryptography`` is imported with the first key: agents without keys do not pay for it.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, SettingsError
from kcoord.secret_files import read_secret
from kcoord.settings import Settings
from kcoord.telemetry.events import log

MANIFEST, PROFILE, PACK = "manifest", "profile", "pack"
OVERHEAD = 256  # bytes, at most, by which an envelope is larger than its content
MAKE = "make one with: kcoord keys new FILE"
UNSIGNED = "it is not signed"
_FORMAT = b"kcoord-signed-1\n"  # no msgpack map begins so, and no part of a profile
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PUBLIC = "ed25519-public:"
_HALF = re.compile(r"[0-9a-fA-F]{64}")  # either half of a key
_SIGNATURE_SIZE = 64  # bytes


@dataclass(frozen=True)
class Key:
    """The raw public half of an Ed25519 key, and the private half (its seed) if this process may sign."""

    public: bytes
    private: bytes | None = field(default=None, repr=False)

    @classmethod
    def of_seed(cls, seed: bytes) -> Key:
        """Raises ValueError where Ed25519 cannot be used."""
        return cls(_ed25519().Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw(), seed)

    @property
    def public_half(self) -> Key:
        return Key(self.public)

    @property
    def text(self) -> str:
        """As a key file has it; that of a private key is secret."""
        return _PUBLIC + self.public.hex() if self.private is None else self.private.hex()

    def sign(self, message: bytes) -> bytes:
        return bytes(_ed25519().Ed25519PrivateKey.from_private_bytes(self.private).sign(message))

    def verifies(self, message: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature  # imported with the first key: see above

        try:
            _ed25519().Ed25519PublicKey.from_public_bytes(self.public).verify(signature, message)
        except InvalidSignature:
            return False
        return True


@functools.lru_cache(maxsize=1)
def _ed25519() -> Any:
    """The module of Ed25519 keys. Raises ValueError where it cannot be used."""
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ValueError(f"signing keys need the package cryptography, which cannot be imported: {error}") from None
    try:
        ed25519.Ed25519PrivateKey.from_private_bytes(bytes(32))
    except UnsupportedAlgorithm as error:  # a FIPS build of OpenSSL, say
        raise ValueError(f"this machine's cryptography has no Ed25519: {error}") from None
    return ed25519


def parse_id(text: str) -> str:
    if not _KEY_ID.fullmatch(text):
        raise ValueError("a key id must be 1 to 64 letters, digits, '-', '_' or '.'")
    return text


def parse_key(text: str) -> Key:
    """A private key, as the 64 hex digits of its seed, or a public one. Raises ValueError, which shows nothing of the key."""
    half = text.removeprefix(_PUBLIC)
    if not _HALF.fullmatch(half):
        raise ValueError(f"its key is not 32 bytes in hex: {MAKE}")
    if half == text:
        return Key.of_seed(bytes.fromhex(half))
    _ed25519()
    return Key(bytes.fromhex(half))


def read_keys(path: Path, setting: str = "KCOORD_SIGNING_KEY_FILE=") -> dict[str, Key]:
    """The keys of a file, by id. A line is ``ID KEY``, or ``ID:KEY`` as in ``KCOORD_SIGNING_KEY``; ``#`` begins a comment.

    Blocks for as long as the file system does. Raises `SettingsError`, which shows nothing of the file's content.
    """
    name = f"{setting}{path}"
    content = read_secret(name, path)
    try:
        lines = content.decode("ascii").splitlines()
    except UnicodeDecodeError:
        lines = []
    keys: dict[str, Key] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key_id, key = _parse_line(words[0].split(":", 1) if len(words) == 1 else words)
            if key_id in keys:
                raise ValueError(f"the key id {key_id!r} is there twice")
            keys[key_id] = key
        except ValueError as error:
            raise SettingsError(f"{name}: line {number}: {error}") from None
    if not keys:
        raise SettingsError(f"{name}: it holds no key: {MAKE}")
    return keys


def _parse_line(words: list[str]) -> tuple[str, Key]:
    if len(words) != 2:
        raise ValueError(f"it must be a key id and a key, as ID:KEY: {MAKE}")
    return parse_id(words[0]), parse_key(words[1])


@dataclass(frozen=True)
class Signature:
    key_id: str
    value: bytes


def split(data: bytes) -> tuple[bytes, Signature | None]:
    """The content of an envelope and its signature, not verified; None as the signature if `data` is no envelope.

    Takes no more memory than `data`, whatever it holds. Raises `ArtifactInvalid` for a torn envelope.
    """
    if not data.startswith(_FORMAT):
        return data, None
    packed = memoryview(data)[len(_FORMAT) :]
    reader = msgpack.Unpacker(
        max_buffer_size=max(1, len(packed)), max_array_len=0, max_map_len=0, max_ext_len=0, max_str_len=64
    )
    try:
        reader.feed(packed)
        parts = reader.read_array_header()
        if parts != 3:
            raise ValueError(f"it has {parts} parts")
        key_id, signature, content = (reader.unpack() for _ in range(3))
        if reader.tell() != len(packed):
            raise ValueError("something follows it")
        if not (isinstance(key_id, str) and _KEY_ID.fullmatch(key_id)):
            raise ValueError("its key id is none")
        if not (isinstance(signature, bytes) and len(signature) == _SIGNATURE_SIZE and isinstance(content, bytes)):
            raise ValueError("it holds something else")
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ArtifactInvalid(f"a signed envelope is torn: {error}") from error
    return content, Signature(key_id, signature)


@dataclass
class Trust:
    """A policy (``off`` or ``require``), and the keys by id: the first private one signs, all verify. No `repr` shows a secret.

    `path` is the keys' file. Any thread may replace `keys` as a whole: each method reads the attribute once.
    """

    policy: str = "off"
    keys: Mapping[str, Key] = field(default_factory=dict)
    path: Path | None = None
    _read: tuple[int, ...] | None = field(
        default=None, repr=False, compare=False
    )  # the identity of the file that was read

    @classmethod
    def of(cls, settings: Settings) -> Trust:
        """The trust that the settings state. Raises `SettingsError` for unusable keys, and for ``require`` without a key."""
        settings = settings.as_mounted()
        trust = cls(settings.policy, path=settings.signing_key_file)
        if trust.path is None and settings.signing_key is not None:
            try:
                trust.keys = dict([_parse_line(settings.signing_key.strip().split(":", 1))])
            except ValueError as error:
                raise SettingsError(f"KCOORD_SIGNING_KEY: {error}") from None
        trust.read_again()
        if trust.required and not trust.keys:
            raise SettingsError(
                f"KCOORD_TRUST=require needs a signing key: set KCOORD_SIGNING_KEY_FILE ({MAKE}), or KCOORD_TRUST=off"
            )
        return trust

    def read_again(self) -> None:
        """Read the keys' file if it has changed since it was read; a change of the keys is logged.

        Blocks for as long as the file system does. Raises `SettingsError`; then the known keys stay in use, and the next call
        reads again.
        """
        if self.path is None:
            return
        identity: tuple[int, ...] | None
        try:
            found = os.stat(self.path)  # noqa: PTH116 - a name's error is told by its reader
            identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
        except OSError:
            identity = None
        if identity is not None and identity == self._read:
            return
        keys = read_keys(self.path)
        changed, self._read = list(keys.items()) != list(self.keys.items()), identity
        if changed and self.keys:
            log.warning("kcoord: new signing keys: %s", Trust(self.policy, keys).roles())
        self.keys = keys

    @property
    def required(self) -> bool:
        return self.policy == "require"

    @property
    def signer(self) -> str:
        """The id of the key that signs; empty if there is none, or all of them only verify."""
        return next((key_id for key_id, key in self.keys.items() if key.private is not None), "")

    @property
    def publishes(self) -> bool:
        """False: what this process puts into the store is signed by nobody, and by its own policy for nobody to use."""
        return not self.required or bool(self.signer)

    def roles(self) -> str:
        """The keys' ids, and which of them signs, for people."""
        signer = self.signer
        others = ", ".join(key_id for key_id in self.keys if key_id != signer)
        if not signer:
            return f"{others} verify, and none signs"
        return f"{signer} signs" + (f"; {others} verify, too" if others else "")

    def seal(self, kind: str, content: bytes) -> bytes:
        """`content` in an envelope signed by the first private key; without one, `content` itself. Equal content, equal bytes."""
        for key_id, key in self.keys.items():
            if key.private is not None:
                signature = key.sign(_message(kind, key_id, content))
                return _FORMAT + bytes(msgpack.packb([key_id, signature, content]))
        return content

    def verifies(self, kind: str, data: bytes) -> bool:
        """True if a known key has signed `data`, under any policy. Raises `ArtifactInvalid` for a torn envelope."""
        return Trust("require", self.keys).doubt(kind, data) is None

    def doubt(self, kind: str, data: bytes) -> ArtifactDistrusted | None:
        """The reason not to use `data`, in an envelope or without one; None if a known key signed it, or the policy is ``off``.

        Raises `ArtifactInvalid` for a torn envelope.
        """
        if not self.required:
            return None
        content, signature = split(data)
        if signature is None:
            return ArtifactDistrusted(UNSIGNED, "let every node that publishes have the key")
        key = self.keys.get(signature.key_id)
        if key is None:
            return ArtifactDistrusted(
                f"the key {signature.key_id!r} that signed it is not known here",
                "add that key to KCOORD_SIGNING_KEY_FILE on this node", unknown_key=True,
            )  # fmt: skip
        if not key.verifies(_message(kind, signature.key_id, content), signature.value):
            return ArtifactDistrusted(
                f"its signature is not that of the key {signature.key_id!r}",
                "look who can write to the store, and that all nodes have one key for each key id",
            )
        return None


OFF = Trust()
VERIFIES_ONLY = "its signing keys only verify: give this node one that signs, or let others publish"
"""The reason not to publish, where `Trust.publishes` is False."""


def _message(kind: str, key_id: str, content: bytes) -> bytes:
    # neither a kind nor a key id holds a NUL, so the message has one reading only
    return b"kcoord signature 1\0" + kind.encode() + b"\0" + key_id.encode() + b"\0" + content
