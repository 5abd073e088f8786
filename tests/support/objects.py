"""Objects of a store, taken apart and put together, by tests that alter them."""

from __future__ import annotations

import struct
from pathlib import Path

from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.object import StoredObject, read_manifest
from kcoord.testing.stores import object_of


def parts_of(path: Path) -> tuple[bytes, bytes]:
    """The manifest's bytes of the object at `path`, and its payload."""
    return parts(path.read_bytes())


def parts(content: bytes) -> tuple[bytes, bytes]:
    encoded, payload, _ = read_manifest(lambda size: content[:size], len(content), len(content))
    return encoded, payload


def put_together(encoded: bytes, payload: bytes) -> bytes:
    return b"kcoord-object-2\n" + struct.pack(">IQ", len(encoded), len(payload)) + encoded + payload


def payload_of(manifest: Manifest, files: dict[str, bytes]) -> bytes:
    return parts(object_of(manifest, files))[1]


def unpack(manifest: Manifest, payload: bytes) -> dict[str, bytes]:
    """The checked files of a payload. Raises `ArtifactInvalid`."""
    return StoredObject(manifest, manifest.encode(), payload).contents()
