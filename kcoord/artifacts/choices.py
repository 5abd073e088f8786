"""A choice: an artifact of one small file. The first writer decides it, and no other rank waits for it.

Its path in the local tier tells who decided. A choice of the *store* holds for all nodes, and lies where other artifacts lie. A
choice that this node made alone, since no store could be asked, lies beside that: it holds until a store has one.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from kcoord.artifacts.local import place_of
from kcoord.artifacts.manifest import FileEntry, Manifest, Origin
from kcoord.errors import ArtifactInvalid
from kcoord.keys.cache_key import CacheKey

LARGEST_CHOICE = 64 << 10  # bytes
_FILE = "choice"


def store_decided(local_dir: Path, digest: str) -> Path:
    """The home of a choice that holds on all nodes of the store."""
    return local_dir / place_of(digest)


def node_decided(local_dir: Path, digest: str) -> Path:
    """The home of a choice that holds on this node, until a store has one."""
    return local_dir / f"{place_of(digest)}.here"


def manifest_of(key: CacheKey, content: bytes, seconds: float, origin: Origin) -> Manifest:
    """`seconds` is the time that the decision took, which a hit saves."""
    return Manifest(key, (FileEntry(_FILE, len(content), hashlib.sha256(content).hexdigest()),), seconds, origin)


def contents_of(content: bytes) -> dict[str, bytes]:
    """The files of a choice, as `kcoord.artifacts.local.install` and `Store.publish` take them."""
    return {_FILE: content}


def content_of(name: str, contents: dict[str, bytes]) -> bytes:
    """The chosen content. `contents` are verified already. Raises `ArtifactInvalid` if they are no choice."""
    content = contents.get(_FILE)
    if content is None or len(contents) != 1 or len(content) > LARGEST_CHOICE:
        raise ArtifactInvalid(f"what lies under the key of {name} is no choice")
    return content
