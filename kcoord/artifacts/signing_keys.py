"""Signing keys: two kinds, their text, and the file that holds them.

A *secret* (HMAC-SHA256) verifies what it signs: every node that has it can sign. An *Ed25519 key* is a pair: its private half
signs, and its public half verifies alone, so that a node that is broken into cannot sign for the others. Ed25519 needs the
package ``cryptography``, which is imported when a key of this kind is used.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from kcoord.errors import SettingsError
from kcoord.secret_files import read_secret

KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
SIGNATURE_SIZES = (hashlib.sha256().digest_size, 64)  # bytes, of the two kinds
MAKE = "make one with: kcoord keys new FILE"
_SHORTEST_SECRET = 16  # bytes
_PRIVATE, _PUBLIC = "ed25519-private:", "ed25519-public:"
_ED25519_SIZE = 32  # bytes of either half


@dataclass(frozen=True)
class Ed25519Key:
    """The raw public key, and the raw private key if this process may sign."""

    public: bytes
    private: bytes | None = field(default=None, repr=False)

    @classmethod
    def of_private(cls, private: bytes) -> Ed25519Key:
        return cls(_ed25519().Ed25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw(), private)

    def sign(self, message: bytes) -> bytes:
        assert self.private is not None  # `signs` is asked first
        return bytes(_ed25519().Ed25519PrivateKey.from_private_bytes(self.private).sign(message))

    def verifies(self, message: bytes, signature: bytes) -> bool:
        from cryptography.exceptions import InvalidSignature

        try:
            _ed25519().Ed25519PublicKey.from_public_bytes(self.public).verify(signature, message)
        except InvalidSignature:
            return False
        return True


Key: TypeAlias = "bytes | Ed25519Key"
"""A secret, or one or both halves of an Ed25519 key. The key, and never a signed file, says which kind of signature counts."""


def signs(key: Key) -> bool:
    return isinstance(key, bytes) or key.private is not None


def signature_of(key: Key, message: bytes) -> bytes:
    """`key` must be one that signs."""
    return hmac.digest(key, message, "sha256") if isinstance(key, bytes) else key.sign(message)


def is_signature_of(key: Key, message: bytes, signature: bytes) -> bool:
    if isinstance(key, bytes):
        return hmac.compare_digest(signature_of(key, message), signature)
    return key.verifies(message, signature)


def public_half(key: Key) -> Key:
    """The key without the right to sign; a secret has none."""
    return key if isinstance(key, bytes) else Ed25519Key(key.public)


def kind_of(key: Key) -> str:
    if isinstance(key, bytes):
        return "secret"
    return "ed25519-public" if key.private is None else "ed25519-private"


def new_key(*, ed25519: bool) -> Key:
    """A random key that signs. Raises `SettingsError` without ``cryptography``."""
    private = os.urandom(_ED25519_SIZE)
    try:
        return Ed25519Key.of_private(private) if ed25519 else private
    except ValueError as error:
        raise SettingsError(str(error)) from None


def text_of(key: Key) -> str:
    """As a key file has it. Of a private key or a secret it is secret."""
    if isinstance(key, bytes):
        return key.hex()
    return (
        _PUBLIC + base64.b64encode(key.public).decode()
        if key.private is None
        else _PRIVATE + base64.b64encode(key.private).decode()
    )


def read_keys(path: Path) -> dict[str, Key]:
    """The keys of a file, by id. A line is ``ID KEY``, or ``ID:KEY`` as in ``KCOORD_SIGNING_KEY``; ``#`` begins a comment.

    Raises `SettingsError`, which shows nothing of the file's content.
    """
    name = f"KCOORD_SIGNING_KEY_FILE={path}"
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
        if len(words) == 1 and ":" in words[0]:
            words = words[0].split(":", 1)
        try:
            if len(words) != 2:
                raise ValueError("it must be a key id and a secret")
            if parse_id(words[0]) in keys:
                raise ValueError(f"the key id {words[0]!r} is there twice")
            keys[words[0]] = parse_key(words[1])
        except ValueError as error:
            raise SettingsError(f"{name}: line {number}: {error}") from None
    if not keys:
        raise SettingsError(f"{name}: it holds no key: {MAKE}")
    return keys


def parse_id(text: str) -> str:
    if not KEY_ID.fullmatch(text):
        raise ValueError("a key id must be 1 to 64 letters, digits, '-', '_' or '.'")
    return text


def parse_key(text: str) -> Key:
    """A secret in hex, or else in base64; or half of an Ed25519 key. Raises ValueError, which shows nothing of the key."""
    if text.startswith(_PRIVATE):
        return Ed25519Key.of_private(_half(text.removeprefix(_PRIVATE)))
    if text.startswith(_PUBLIC):
        key = Ed25519Key(_half(text.removeprefix(_PUBLIC)))
        _ed25519().Ed25519PublicKey.from_public_bytes(key.public)
        return key
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        try:
            secret = base64.b64decode(text, validate=True)
        except ValueError:
            raise ValueError("its secret is neither hex nor base64") from None
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(f"its secret has {len(secret)} bytes; it must have {_SHORTEST_SECRET} at least: {MAKE}")
    return secret


def _half(text: str) -> bytes:
    try:
        half = base64.b64decode(text, validate=True)
    except ValueError:
        raise ValueError("its Ed25519 key is no base64") from None
    if len(half) != _ED25519_SIZE:
        raise ValueError(f"its Ed25519 key has {len(half)} bytes; it must have {_ED25519_SIZE}: {MAKE} --ed25519")
    return half


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise ValueError("an Ed25519 key needs the package cryptography: pip install 'kcoord[signing]'") from None
    return ed25519
