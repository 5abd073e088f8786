"""Signatures of artifacts, profiles and bundles, by secrets that the agents share.

A user who can write to the store can put code there that ranks load. Agents therefore sign what they publish with HMAC-SHA256:
an artifact's manifest, which states the SHA-256 of the other files, each part of a profile, and a bundle's index. A signed file
is an *envelope*: the content, the key's id and the MAC.

A valid signature proves that *one* holder of the secret signed, not which one: every agent that can verify can sign. Not
guaranteed: that the newest signed content is there; an older artifact of the same key is as good.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgpack

from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, SettingsError
from kcoord.secret_files import read_secret
from kcoord.settings import Settings

MANIFEST, PROFILE, BUNDLE = "manifest", "profile", "bundle"
OVERHEAD = 256  # bytes, at most, by which an envelope is larger than its content
_FORMAT = b"kcoord-signed-1\n"  # no msgpack map begins so, and no part of a profile
_KEY_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAC = hashlib.sha256().digest_size
_SHORTEST_SECRET = 16  # bytes
_MAKE = 'make one with: echo "main $(openssl rand -hex 32)" > FILE; chmod 600 FILE'


@dataclass(frozen=True)
class Signature:
    key_id: str
    mac: bytes


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
        key_id, mac, content = (reader.unpack() for _ in range(3))
        if reader.tell() != len(packed):
            raise ValueError("something follows it")
        if not (isinstance(key_id, str) and _KEY_ID.fullmatch(key_id)):
            raise ValueError("its key id is none")
        if not (isinstance(mac, bytes) and len(mac) == _MAC and isinstance(content, bytes)):
            raise ValueError("it holds something else")
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ArtifactInvalid(f"a signed envelope is torn: {error}") from error
    return content, Signature(key_id, mac)


@dataclass
class Trust:
    """A policy, and the keys by id: the first signs, all verify. No message or `repr` shows the secrets.

    Any thread may replace `keys` as a whole: each method reads the attribute once.
    """

    policy: str = "off"
    keys: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, settings: Settings) -> Trust:
        """The trust that the settings state. Raises `SettingsError` for unusable keys, and for ``require`` without a key."""
        settings = settings.as_mounted()
        keys: dict[str, bytes] = {}
        if settings.signing_key_file is not None:
            keys = read_keys(settings.signing_key_file)
        elif settings.signing_key is not None:
            key_id, colon, secret = settings.signing_key.strip().partition(":")
            try:
                if not colon:
                    raise ValueError("it must be ID:SECRET")
                keys = {_id(key_id): _secret(secret)}
            except ValueError as error:
                raise SettingsError(f"KCOORD_SIGNING_KEY: {error}") from None
        policy = settings.policy
        if policy == "require" and not keys:
            raise SettingsError(
                f"KCOORD_TRUST=require needs a signing key: set KCOORD_SIGNING_KEY_FILE ({_MAKE}), or KCOORD_TRUST=off"
            )
        return cls(policy, keys)

    @property
    def required(self) -> bool:
        return self.policy == "require"

    @property
    def signer(self) -> str:
        """The id of the key that signs; empty if there is none."""
        return next(iter(self.keys), "")

    def only(self, key_id: str) -> Trust:
        """The same policy with this key alone."""
        return Trust(self.policy, {key_id: self.keys[key_id]})

    def seal(self, kind: str, content: bytes) -> bytes:
        """`content` in an envelope that the first key signs; without a key, `content` itself. Equal content, equal bytes."""
        for key_id, secret in self.keys.items():
            return _FORMAT + bytes(msgpack.packb([key_id, _mac(secret, kind, key_id, content), content]))
        return content

    def verifies(self, kind: str, data: bytes) -> bool:
        """True if a known key has signed `data`, under any policy. Raises `ArtifactInvalid` for a torn envelope."""
        return Trust("require", self.keys).doubt(kind, data) is None

    def doubt(self, kind: str, data: bytes) -> ArtifactDistrusted | None:
        """The reason not to trust `data`, in an envelope or without one; None if a known key signed it, or the policy is ``off``.

        Raises `ArtifactInvalid` for a torn envelope.
        """
        if self.policy == "off":
            return None
        content, signature = split(data)
        if signature is None:
            return ArtifactDistrusted("it is not signed", f"sign what is there: {_SIGN}")
        secret = self.keys.get(signature.key_id)
        if secret is None:
            return ArtifactDistrusted(
                f"the key {signature.key_id!r} that signed it is not known here",
                "add that key to KCOORD_SIGNING_KEY_FILE on this node", unknown_key=True,
            )  # fmt: skip
        if not hmac.compare_digest(_mac(secret, kind, signature.key_id, content), signature.mac):
            return ArtifactDistrusted(
                f"its signature is not that of the key {signature.key_id!r}",
                "look who can write to the store, and that all nodes have one secret for each key id",
            )
        return None


OFF = Trust()
_SIGN = "let every node that publishes have the key, and see 'kcoord verify'"


def _mac(secret: bytes, kind: str, key_id: str, content: bytes) -> bytes:
    # neither a kind nor a key id holds a NUL, so the message has one reading only
    message = b"kcoord signature 1\0" + kind.encode() + b"\0" + key_id.encode() + b"\0" + content
    return hmac.digest(secret, message, "sha256")


def read_keys(path: Path) -> dict[str, bytes]:
    """The keys of a file, by id. A line is ``ID SECRET``, or ``ID:SECRET`` as in ``KCOORD_SIGNING_KEY``; ``#`` begins a comment.

    Raises `SettingsError`, which shows nothing of the file's content.
    """
    name = f"KCOORD_SIGNING_KEY_FILE={path}"
    content = read_secret(name, path)
    try:
        lines = content.decode("ascii").splitlines()
    except UnicodeDecodeError:
        lines = []
    keys: dict[str, bytes] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) == 1 and ":" in words[0]:
            words = words[0].split(":", 1)
        try:
            if len(words) != 2:
                raise ValueError("it must be a key id and a secret")
            if _id(words[0]) in keys:
                raise ValueError(f"the key id {words[0]!r} is there twice")
            keys[words[0]] = _secret(words[1])
        except ValueError as error:
            raise SettingsError(f"{name}: line {number}: {error}") from None
    if not keys:
        raise SettingsError(f"{name}: it holds no key: {_MAKE}")
    return keys


def _id(text: str) -> str:
    if not _KEY_ID.fullmatch(text):
        raise ValueError("a key id must be 1 to 64 letters, digits, '-', '_' or '.'")
    return text


def _secret(text: str) -> bytes:
    """Decode hex, or else base64. Raises ValueError, which shows nothing of the secret."""
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        import base64  # a rank needs neither it nor a key

        try:
            secret = base64.b64decode(text, validate=True)
        except ValueError:
            raise ValueError("its secret is neither hex nor base64") from None
    if len(secret) < _SHORTEST_SECRET:
        raise ValueError(
            f"its secret has {len(secret)} bytes; it must have {_SHORTEST_SECRET} at least: openssl rand -hex 32"
        )
    return secret
