"""An object as a pack holds it: an artifact's manifest and payload, behind their sizes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from kcoord.artifacts.manifest import LARGEST_ARTIFACT, LARGEST_MANIFEST, Manifest
from kcoord.artifacts.payload import check_sizes, unpack
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid

_SIZES = struct.Struct(">IQ")
LARGEST_OBJECT = _SIZES.size + LARGEST_MANIFEST + LARGEST_ARTIFACT  # bytes

Read = Callable[[int], bytes]


@dataclass(frozen=True)
class StoredObject:
    """An object that was read. `manifest` is decoded from the bytes `encoded`; the payload is not unpacked yet."""

    manifest: Manifest
    encoded: bytes
    payload: bytes

    @property
    def size(self) -> int:
        return _SIZES.size + len(self.encoded) + len(self.payload)

    def pieces(self) -> tuple[bytes, bytes, bytes]:
        """The object's bytes."""
        return _SIZES.pack(len(self.encoded), len(self.payload)), self.encoded, self.payload

    def contents(self) -> dict[str, bytes]:
        """The checked files, by name. Raises `ArtifactInvalid`; memory stays within the sizes that the manifest states."""
        return unpack(self.manifest, self.payload)


def read_object(read: Read, size: int, judge: Callable[[bytes], Manifest]) -> StoredObject:
    """Read an object of `size` bytes. ``judge(encoded)`` decodes the manifest, or raises `ArtifactInvalid`.

    It is asked before anything that the manifest states is obeyed. Nothing of the payload is verified: see
    `StoredObject.contents`. Raises `ArtifactInvalid` and OSError.
    """
    head = read(_SIZES.size)
    manifest, payload = _SIZES.unpack(head) if len(head) == _SIZES.size else (0, 0)
    if manifest > LARGEST_MANIFEST or _SIZES.size + manifest + payload != size:
        raise ArtifactInvalid(f"its {size} bytes are not those that its header states")
    encoded = read(manifest)
    judged = judge(encoded)
    if check_sizes(judged).size != payload:
        raise ArtifactInvalid("its manifest states another payload")
    return StoredObject(judged, encoded, read(payload))


def object_in(store: Store, digest: str, largest: int | None = None) -> StoredObject | None:
    """The object of an artifact of `store`, verified; None if there is none. See `Store.files`."""
    found = store.files(digest, largest)
    return None if found is None else StoredObject(*found)


def publish_object(store: Store, artifact: StoredObject) -> None:
    """Publish an object, which the caller has verified. Raises `StoreError`."""
    store.publish_files(artifact.manifest.key.digest, artifact.encoded, artifact.payload)
