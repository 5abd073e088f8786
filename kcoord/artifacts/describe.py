"""Reads staged files once: their manifest, the GPUs that they are for, and the text of those that name their own directory."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kcoord.artifacts.arch import RecordedTargets
from kcoord.artifacts.manifest import (
    HOME_PLACEHOLDER,
    LARGEST_ARTIFACT,
    MANIFEST_NAME,
    FileEntry,
    Manifest,
    Origin,
    home_token,
)
from kcoord.errors import ArtifactInvalid
from kcoord.files.reading import read_plain
from kcoord.keys.cache_key import CacheKey


@dataclass(frozen=True)
class Staged:
    """Described files: the manifest, its encoding, and by name the portable text of the relocatable files."""

    manifest: Manifest
    encoded: bytes
    relocatable: dict[str, bytes]


def seal(staging: Path, key: CacheKey, compile_seconds: float, origin: Origin, home: Path | None = None) -> Manifest:
    """`describe` the files in `staging`, then write their manifest there. Raises `ArtifactInvalid` as `describe` does."""
    staged = describe(staging, key, compile_seconds, origin, home)
    (staging / MANIFEST_NAME).write_bytes(staged.encoded)
    return staged.manifest


def describe(staging: Path, key: CacheKey, compile_seconds: float, origin: Origin, home: Path | None = None) -> Staged:
    """Read and hash each file in `staging` once; write nothing.

    A JSON file that holds `HOME_PLACEHOLDER`, or the name of `home`, is relocatable. Raises `ArtifactInvalid` if `staging` holds
    no file, anything but plain files and directories, or names that a manifest cannot state.
    """
    files: list[FileEntry] = []
    relocatable: dict[str, bytes] = {}
    targets = RecordedTargets()
    for name in _names(staging):
        content = read_plain(staging / name, LARGEST_ARTIFACT)
        targets.add(name, content)
        if name.endswith(".json"):
            if home is not None:  # an agent that was killed before its rename has replaced the placeholder already
                content = content.replace(home_token(home), HOME_PLACEHOLDER)
            if HOME_PLACEHOLDER in content:
                relocatable[name] = content
        files.append(FileEntry(name, len(content), hashlib.sha256(content).hexdigest(), name in relocatable))
    if not files:
        raise ArtifactInvalid(f"{key.name}: the compile function wrote no file into its staging directory")
    files.sort(key=lambda f: f.name)
    manifest = Manifest(key, tuple(files), max(0.0, compile_seconds), origin, targets=targets.result(), made_here=True)
    encoded = manifest.encode()
    Manifest.decode(encoded)  # never publish a manifest that no reader accepts
    return Staged(manifest, encoded, relocatable)


def _names(staging: Path) -> Iterator[str]:
    """The relative names of the plain files, without the manifest."""
    for directory, folders, names in os.walk(staging):
        for name in folders + names:
            path = Path(directory, name)
            mode = path.lstat().st_mode
            relative = path.relative_to(staging).as_posix()
            if stat.S_ISDIR(mode) or relative == MANIFEST_NAME:
                continue
            if not stat.S_ISREG(mode):
                raise ArtifactInvalid(f"{relative} is neither a plain file nor a directory")
            yield relative
