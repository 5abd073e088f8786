"""Reads staged files once: their manifest, the GPUs and libraries that they need, and the texts that name their own directory."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kcoord.artifacts import elf
from kcoord.artifacts.arch import RecordedTargets
from kcoord.artifacts.manifest import (
    HOME_PLACEHOLDER,
    LARGEST_ARTIFACT,
    LARGEST_IN_MEMORY,
    MANIFEST_NAME,
    MOST_NEEDS,
    PIECE,
    FileEntry,
    Manifest,
    Origin,
    home_token,
)
from kcoord.artifacts.needs import needs_of
from kcoord.errors import ArtifactInvalid
from kcoord.files.reading import open_plain, read_plain
from kcoord.keys.cache_key import CacheKey


@dataclass(frozen=True)
class Staged:
    """Described files: the manifest, its encoding, and by name the portable text of the relocatable files.

    `contents`: of all files, portable; None if they are more than `LARGEST_IN_MEMORY` bytes.
    """

    manifest: Manifest
    encoded: bytes
    relocatable: dict[str, bytes]
    contents: dict[str, bytes] | None


def describe(staging: Path, key: CacheKey, compile_seconds: float, origin: Origin, home: Path | None = None) -> Staged:
    """Read and hash each file in `staging` once; write nothing.

    A JSON file that holds `HOME_PLACEHOLDER`, or the name of `home`, is relocatable. Raises `ArtifactInvalid` if `staging` holds
    no file, anything but plain files and directories, or names that a manifest cannot state.
    """
    files: list[FileEntry] = []
    contents: dict[str, bytes] = {}
    relocatable: dict[str, bytes] = {}
    targets, needs = RecordedTargets(), set[str]()
    sizes = dict(_names(staging))
    in_memory = sum(sizes.values()) <= LARGEST_IN_MEMORY
    for name in sizes:
        if not (in_memory or name.endswith(".json")):
            files.append(_hashed(staging, name, targets, needs))
            continue
        content = read_plain(staging / name, LARGEST_ARTIFACT)
        targets.add(name, content)
        needs |= needs_of(elf.of_bytes(content))
        if name.endswith(".json"):
            if home is not None:  # an agent that was killed before its rename has replaced the placeholder already
                content = content.replace(home_token(home), HOME_PLACEHOLDER)
            if HOME_PLACEHOLDER in content:
                relocatable[name] = content
        files.append(FileEntry(name, len(content), hashlib.sha256(content).hexdigest(), name in relocatable))
        if in_memory:
            contents[name] = content
    if not files:
        raise ArtifactInvalid(f"{key.name}: its compile wrote no file into its staging directory")
    files.sort(key=lambda f: f.name)
    needed = tuple(sorted(needs)[:MOST_NEEDS])
    manifest = Manifest(
        key, tuple(files), max(0.0, compile_seconds), origin, targets=targets.result(), made_here=True, needs=needed
    )
    encoded = manifest.encode()
    Manifest.decode(encoded)  # never publish a manifest that no reader accepts
    return Staged(manifest, encoded, relocatable, contents if in_memory else None)


def _hashed(staging: Path, name: str, targets: RecordedTargets, needs: set[str]) -> FileEntry:
    digest, size = hashlib.sha256(), 0
    with open_plain(staging / name, LARGEST_ARTIFACT) as file:
        while piece := file.read(PIECE):
            if not size:
                targets.add(name, piece)
            digest.update(piece)
            size += len(piece)
        needs |= needs_of(elf.of_file(file))
    return FileEntry(name, size, digest.hexdigest())


def _names(staging: Path) -> Iterator[tuple[str, int]]:
    """The relative names and sizes of the plain files, without the manifest."""
    for directory, folders, names in os.walk(staging):
        for name in folders + names:
            path = Path(directory, name)
            found = path.lstat()
            mode = found.st_mode
            relative = path.relative_to(staging).as_posix()
            if stat.S_ISDIR(mode) or relative == MANIFEST_NAME:
                continue
            if not stat.S_ISREG(mode):
                raise ArtifactInvalid(f"{relative} is neither a plain file nor a directory")
            yield relative, found.st_size
