"""Lists all artifacts, for people. It lists directories: never call it on a job's way, or without a bound after it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from kcoord.artifacts.manifest import MANIFEST_NAME, Manifest
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import check_is_store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files.atomic import written_at
from kcoord.files.faults import store_errors
from kcoord.files.private import check_tier
from kcoord.settings import Settings


def newest_first(
    settings: Settings, wanted: Callable[[str], bool] = lambda digest: True, since: float = 0.0
) -> Iterator[Manifest]:
    """The manifests of the store's and the local tier's artifacts whose digests are `wanted`, each key once, newest first.

    `since`: artifacts that came to this node before that moment, in Unix seconds, are left out. They are read one by one; memory
    holds a name and a time of each. Raises `StoreError`; at the call if there is no store.
    """
    root = settings.store_root
    stored: list[tuple[float, str]] = []
    if root is not None:
        check_is_store(root)
        with store_errors(root):
            stored = [(found.st_mtime, path.name) for path, found in Store(root).objects() if wanted(path.name)]
    local = [(written_at(path.parent), str(path.parent)) for path in local_manifests(settings.local_dir, since)]
    local = [(written, home) for written, home in local if written >= since]
    found = _each(Store(root) if root is not None else None, {name for _, name in stored}, [*stored, *local])
    return (manifest for manifest in found if wanted(manifest.key.digest))


def _each(store: Store | None, in_store: set[str], found: list[tuple[float, str]]) -> Iterator[Manifest]:
    for _, name in sorted(found, reverse=True):
        manifest = store.readable_manifest(name) if store is not None and name in in_store else _read(Path(name))
        if manifest is not None and (name in in_store or manifest.key.digest not in in_store):
            yield manifest


def local_manifests(local_dir: Path, since: float = 0.0) -> Iterator[Path]:
    """The paths of this node's manifests, in directories that have changed after `since`. Raises `StoreError` if one cannot be
    listed.
    """
    with store_errors(local_dir):
        for tier in tiers(local_dir):
            for home in tier.iterdir() if tier.stat().st_mtime >= since else ():
                if _has_manifest(home):
                    yield home / MANIFEST_NAME


def _has_manifest(home: Path) -> bool:
    try:
        (home / MANIFEST_NAME).lstat()
    except (FileNotFoundError, NotADirectoryError):  # the compiler's own, or nobody's
        return False
    except OSError:
        return True  # its reader reports why it cannot be read
    return True


def _read(home: Path) -> Manifest | None:
    try:
        return Manifest.read(home)
    except (ArtifactInvalid, OSError):
        return None  # it is being removed, or damaged, which `kcoord verify` reports


def _is_ours(cache: Path) -> bool:
    try:
        check_tier(cache)
    except StoreError:
        return False
    return True


_BUCKET = re.compile(r"[0-9a-f]{2}")


def tiers(local_dir: Path) -> list[Path]:
    """The directories that homes lie in: those of `local_dir`, and the compilers' caches that this environment names.

    A compiler's cache (a variable ``…_CACHE_DIR``, or a directory of `local_dir`) is one once kcoord has staged a file there.
    It may be a link to a larger disk. A cache that others may write to is left alone. Raises OSError.
    """
    caches = sorted(local_dir.iterdir()) if local_dir.is_dir() else []
    caches += [Path(value) for name, value in os.environ.items() if name.endswith("_CACHE_DIR") and value]
    caches = [path for path in caches if (path / ".kcoord").is_dir() and _is_ours(path)]
    try:
        buckets = sorted(p for p in (local_dir / "objects").iterdir() if _BUCKET.fullmatch(p.name))
    except FileNotFoundError:
        buckets = []
    found = [*caches, *(p for p in buckets if p.is_dir() and not p.is_symlink())]
    return list({os.path.realpath(path): path for path in found}.values())
