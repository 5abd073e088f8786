"""All artifacts there are, for people. It lists directories: never call it on a job's way."""

from __future__ import annotations

import os
from pathlib import Path

from kcoord.artifacts.manifest import MANIFEST_NAME, Manifest
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid
from kcoord.settings import Settings


def artifacts_of(settings: Settings) -> list[Manifest]:
    """The manifests of the store's and the local tier's artifacts, each key once. Raises `StoreError`."""
    found = {m.key.digest: m for m in _local(settings)}
    if settings.store is not None:
        found |= {m.key.digest: m for m in Store(settings.store).manifests()}
    return list(found.values())


def _local(settings: Settings) -> list[Manifest]:
    triton = Path(os.environ.get("TRITON_CACHE_DIR") or settings.local_dir / "triton")
    found = []
    for root, pattern in ((settings.local_dir / "objects", "??/*"), (triton, "*")):
        for path in root.glob(f"{pattern}/{MANIFEST_NAME}"):
            try:
                found.append(Manifest.decode(path.read_bytes()))
            except (ArtifactInvalid, OSError):
                continue  # it is being removed, or not ours to judge here
    return found
