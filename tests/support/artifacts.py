"""Artifacts for tests: their keys, files and manifests, and some that a store or a local tier already has."""

from __future__ import annotations

import os
from pathlib import Path

from kcoord.artifacts import local
from kcoord.artifacts.manifest import Origin
from kcoord.artifacts.store import Store
from kcoord.keys.cache_key import CacheKey
from kcoord.testing.stores import manifest_of

DAY = 86400.0  # seconds
ORIGIN = Origin("host", 1, 0, "cuda:90#0", 1.7e9)


def publish(store: Store, name: str, age: float = 0.0) -> str:
    """An artifact of `store` that was last used `age` seconds ago; its digest."""
    manifest = manifest_of({"k": name.encode()}, CacheKey.of("test", name))
    store.publish(manifest, {"k": name.encode()})
    older(store.home(manifest.key.digest), age)
    return manifest.key.digest


def make_home(local_dir: Path, name: str, unused: float) -> Path:
    """An artifact in the local tier that was read last `unused` seconds ago."""
    key = CacheKey.of("test", name)
    home = local_dir / "objects" / key.digest[:2] / key.digest
    staging = local.new_staging(home)
    (staging / "kernel.txt").write_text(name)
    local.publish_local(staging, home, key, 1.0, ORIGIN)
    set_unused(home, unused)
    return home


def set_unused(home: Path, unused: float) -> None:
    at = home.stat().st_ctime - unused
    for path in home.iterdir():
        os.utime(path, (at, at))


def older(path: Path, age: float = DAY) -> Path:
    """`path`, with a modification time that is `age` seconds earlier."""
    at = path.stat().st_mtime - age
    os.utime(path, (at, at))
    return path
