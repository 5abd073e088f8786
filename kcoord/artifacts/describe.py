"""The manifest of staged files: names, sizes and hashes."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from kcoord.artifacts.arch import recorded_targets
from kcoord.artifacts.manifest import HOME_PLACEHOLDER, MANIFEST_NAME, FileEntry, Manifest, Origin, home_token
from kcoord.errors import ArtifactInvalid
from kcoord.keys.cache_key import CacheKey


def seal(staging: Path, key: CacheKey, compile_seconds: float, origin: Origin, home: Path | None = None) -> Manifest:
    """`describe` the files in `staging`, and write the manifest, last. Raises `ArtifactInvalid` as `describe` does."""
    manifest = describe(staging, key, compile_seconds, origin, home)
    (staging / MANIFEST_NAME).write_bytes(manifest.encode())
    return manifest


def describe(
    staging: Path, key: CacheKey, compile_seconds: float, origin: Origin, home: Path | None = None
) -> Manifest:
    """Hash every file in `staging`; nothing is written.

    Files with `HOME_PLACEHOLDER`, or with the name of `home` itself, are relocatable. Raises `ArtifactInvalid` if
    `staging` holds nothing, anything but plain files and directories, or what no manifest can state.
    """
    files = tuple(sorted(_entries(staging, home), key=lambda f: f.name))
    if not files:
        raise ArtifactInvalid(f"{key.name}: the compile function wrote no file into its staging directory")
    manifest = Manifest(key, files, max(0.0, compile_seconds), origin, targets=recorded_targets(staging))
    try:
        encoded = manifest.encode()
    except UnicodeEncodeError as error:
        raise ArtifactInvalid(f"{key.name}: a name in its manifest is not UTF-8: {error.object!r}") from error
    Manifest.decode(encoded)  # what nobody could read back is not published
    return manifest


def _entries(staging: Path, home: Path | None) -> Iterator[FileEntry]:
    for directory, folders, names in os.walk(staging):
        for name in folders + names:
            path = Path(directory, name)
            mode = path.lstat().st_mode
            relative = path.relative_to(staging).as_posix()
            if stat.S_ISDIR(mode) or relative == MANIFEST_NAME:
                continue
            if not stat.S_ISREG(mode):
                raise ArtifactInvalid(f"{relative} is neither a plain file nor a directory")
            content = path.read_bytes()
            relocatable = False
            if relative.endswith(".json"):
                if home is not None:  # settled by an agent that was killed before it could rename
                    content = content.replace(home_token(home), HOME_PLACEHOLDER)
                relocatable = HOME_PLACEHOLDER in content
            yield FileEntry(relative, len(content), hashlib.sha256(content).hexdigest(), relocatable)
