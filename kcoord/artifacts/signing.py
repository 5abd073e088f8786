"""Signatures of artifacts, profiles and packs.

A user who can write to the store can put code there that ranks load. Agents therefore sign what they publish: an artifact's
manifest, which states the SHA-256 of the other files, each part of a profile, and a pack's index. A signed file is an
*envelope*: the content, the key's id and the signature. `kcoord.artifacts.signing_keys` has the two kinds of keys.

A valid signature proves that *one* holder of the key signed, not which one. Not guaranteed: that the newest signed content is
there; an older artifact of the same key is as good.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgpack

from kcoord.artifacts.signing_keys import (
    KEY_ID,
    MAKE,
    SIGNATURE_SIZES,
    Key,
    is_signature_of,
    parse_id,
    parse_key,
    read_keys,
    signature_of,
    signs,
)
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, SettingsError
from kcoord.settings import Settings

MANIFEST, PROFILE, PACK = "manifest", "profile", "pack"
OVERHEAD = 256  # bytes, at most, by which an envelope is larger than its content
_FORMAT = b"kcoord-signed-1\n"  # no msgpack map begins so, and no part of a profile


@dataclass(frozen=True)
class Signature:
    key_id: str
    mac: bytes  # or, of an Ed25519 key, the signature


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
        if not (isinstance(key_id, str) and KEY_ID.fullmatch(key_id)):
            raise ValueError("its key id is none")
        if not (isinstance(mac, bytes) and len(mac) in SIGNATURE_SIZES and isinstance(content, bytes)):
            raise ValueError("it holds something else")
    except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
        raise ArtifactInvalid(f"a signed envelope is torn: {error}") from error
    return content, Signature(key_id, mac)


@dataclass
class Trust:
    """A policy, and the keys by id: the first that can sign signs, all verify. No message or `repr` shows the secrets.

    Any thread may replace `keys` as a whole: each method reads the attribute once.
    """

    policy: str = "off"
    keys: Mapping[str, Key] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, settings: Settings) -> Trust:
        """The trust that the settings state. Raises `SettingsError` for unusable keys, and for ``require`` without a key."""
        settings = settings.as_mounted()
        keys: dict[str, Key] = {}
        if settings.signing_key_file is not None:
            keys = read_keys(settings.signing_key_file)
        elif settings.signing_key is not None:
            key_id, colon, secret = settings.signing_key.strip().partition(":")
            try:
                if not colon:
                    raise ValueError("it must be ID:SECRET")
                keys = {parse_id(key_id): parse_key(secret)}
            except ValueError as error:
                raise SettingsError(f"KCOORD_SIGNING_KEY: {error}") from None
        policy = settings.policy
        if policy == "require" and not keys:
            raise SettingsError(
                f"KCOORD_TRUST=require needs a signing key: set KCOORD_SIGNING_KEY_FILE ({MAKE}), or KCOORD_TRUST=off"
            )
        return cls(policy, keys)

    @property
    def required(self) -> bool:
        return self.policy == "require"

    @property
    def signer(self) -> str:
        """The id of the key that signs; empty if there is none, or all of them only verify."""
        return next(iter(self.signers), "")

    @property
    def signers(self) -> dict[str, Key]:
        """The keys that can sign."""
        return {key_id: key for key_id, key in self.keys.items() if signs(key)}

    @property
    def publishes(self) -> bool:
        """False: what this process puts into the store is signed by nobody, and by its own policy for nobody to use."""
        return not self.required or bool(self.signers)

    def roles(self) -> str:
        """The keys' ids, and which of them signs, for people."""
        signer = self.signer
        others = ", ".join(key_id for key_id in self.keys if key_id != signer)
        if not signer:
            return f"{others} verify, and none signs"
        return f"{signer} signs" + (f"; {others} verify, too" if others else "")

    def only(self, key_id: str) -> Trust:
        """The same policy with this key alone."""
        return Trust(self.policy, {key_id: self.keys[key_id]})

    def seal(self, kind: str, content: bytes) -> bytes:
        """`content` in an envelope that the first key signs; without one, `content` itself. Equal content, equal bytes."""
        for key_id, key in self.signers.items():
            signature = signature_of(key, _message(kind, key_id, content))
            return _FORMAT + bytes(msgpack.packb([key_id, signature, content]))
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
        key = self.keys.get(signature.key_id)
        if key is None:
            return ArtifactDistrusted(
                f"the key {signature.key_id!r} that signed it is not known here",
                "add that key to KCOORD_SIGNING_KEY_FILE on this node", unknown_key=True,
            )  # fmt: skip
        if not is_signature_of(key, _message(kind, signature.key_id, content), signature.mac):
            return ArtifactDistrusted(
                f"its signature is not that of the key {signature.key_id!r}",
                "look who can write to the store, and that all nodes have one key for each key id",
            )
        return None


OFF = Trust()
VERIFIES_ONLY = "its signing keys only verify: give this node one that signs, or let others publish"
"""The reason not to publish, where `Trust.publishes` is False."""
_SIGN = "let every node that publishes have the key"


def _message(kind: str, key_id: str, content: bytes) -> bytes:
    # neither a kind nor a key id holds a NUL, so the message has one reading only
    return b"kcoord signature 1\0" + kind.encode() + b"\0" + key_id.encode() + b"\0" + content
