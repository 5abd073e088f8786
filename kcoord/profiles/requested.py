"""Artifacts that a profile's jobs requested: the digests of their keys, and their places in the local tier.

A recipe outlives a change of the compiler or of the kernel's source, so it names no artifact. This list does: it serves to bring
exactly these artifacts to a node before its job starts. After a change it is worthless and harmless: nothing asks for them.

The list is ``<store>/v2/needs/<profile>/``, in files like a profile's parts: each agent renames its own into place, named after
its content, so that equal nodes write one file. A reader merges them, without a lock. `kcoord.profiles.compaction` merges old
files into one now and then. Untrusted: a file may be torn, another version's or another user's. A forged one can at worst have
artifacts fetched that no job uses, and artifacts of a node kept: each is verified, and put where its own key belongs.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from kcoord.errors import StoreError
from kcoord.files.atomic import LAYOUT
from kcoord.files.faults import store_errors
from kcoord.files.shared_directory import read_all, save, written_at
from kcoord.profiles.profile_files import FileFormat, profiles_in

MOST_REQUESTED = 100_000  # artifacts of a profile
_MOST_FILES = 4096
_MOST_KNOWN = 2 * MOST_REQUESTED  # different ones in all files of a profile, which anybody may have written
REQUESTED = FileFormat(b"kcoord-needs-1\n", ".needs", largest=32 << 20, most=MOST_REQUESTED, values=3)
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PLACE = re.compile(
    r"(?!objects/|packs/|profiles/|profiles-unsigned/|stats/|toolchain/|traces/)[a-z0-9][a-z0-9_-]{0,63}/[A-Za-z0-9_=-]{1,200}"
    r"|objects/[0-9a-f]{2}/[0-9a-f]{64}"
)
"""A compiler's tier or kcoord's; nothing else of the local directory."""


@dataclass(frozen=True)
class RequestedArtifact:
    """The artifact of the key `digest`, found at `place` below the local directory. Raises ValueError if either is malformed.

    Nothing is put at a `place` unless the artifact's own key says the same (`kcoord.backends.registry.place_of`).
    """

    digest: str
    place: str

    def __post_init__(self) -> None:
        if not isinstance(self.digest, str) or not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"{self.digest!r:.80} is no digest")
        if not isinstance(self.place, str) or not _PLACE.fullmatch(self.place):
            raise ValueError(f"{self.place!r:.80} is no place in the local directory")

    def to_wire(self) -> list[str]:
        return list(astuple(self))

    @classmethod
    def from_wire(cls, data: Any) -> RequestedArtifact:
        """Raises ValueError on anything that `to_wire` does not return."""
        if not isinstance(data, list) or len(data) != 2:
            raise ValueError("a requested artifact is a digest and a place")
        return cls(*data)


def requested_directory(store: Path, profile: str) -> Path:
    return store / LAYOUT / "needs" / profile


def requested_profiles(store: Path) -> list[str]:
    """The profiles with a list of requested artifacts. Raises `StoreError`."""
    return profiles_in(requested_directory(store, ""))


def load_requested(directory: Path) -> list[RequestedArtifact]:
    """All requested artifacts, each once: those of the newest file first, in the order of their requests.

    Skips a file that cannot be read: its artifacts are fetched when a rank asks. Raises `StoreError` if the directory cannot be
    listed. Blocks for as long as the file system does.
    """
    files = _read_all(directory)
    found: dict[RequestedArtifact, None] = {}
    for path in sorted(files, key=written_at, reverse=True):
        for artifact in files[path]:
            if len(found) >= MOST_REQUESTED:
                return list(found)
            found.setdefault(artifact)
    return list(found)


def all_requested(directory: Path) -> set[RequestedArtifact]:
    """All requested artifacts, for a caller that removes others. Raises `StoreError` if one may be missing."""
    files = _read_all(directory, complete=True)
    unread = [path for path, artifacts in files.items() if not artifacts]
    if unread:
        raise StoreError(f"{unread[0]}: this list of requested artifacts cannot be read: look at it, or remove it")
    return {artifact for artifacts in files.values() for artifact in artifacts}


def read_named(path: Path) -> list[RequestedArtifact]:
    """The content of a file, in its order; empty if it cannot be read, or is not named after its content.

    A writer that replaces such a file replaces it by the same artifacts.
    """
    artifacts = _read(path) or []
    return artifacts if path.name == requested_name(artifacts) else []


def requested_name(artifacts: Collection[RequestedArtifact]) -> str:
    """The name of a file that holds `artifacts`, in any order."""
    return REQUESTED.name("\n".join(sorted(f"{artifact.digest} {artifact.place}" for artifact in artifacts)))


def save_requested(
    directory: Path, artifacts: Collection[RequestedArtifact], earlier: Path | None = None, at: float | None = None
) -> Path:
    """Write `artifacts`, in their order, as one file, atomically and durably; returns its path. Raises `StoreError`.

    Removes `earlier`, the result of the same writer's last call, whose artifacts must all be in `artifacts`. `at`: the file's
    `written_at`, if not now.
    """
    content = REQUESTED.encode(artifact.to_wire() for artifact in artifacts)
    return save(directory, requested_name(artifacts), content, earlier, at)


def _read_all(directory: Path, *, complete: bool = False) -> dict[Path, list[RequestedArtifact]]:
    """The content of each file; empty of one that cannot be read. `complete`: all files of one moment, or `StoreError`.

    Raises `StoreError`.
    """
    found: dict[Path, list[RequestedArtifact]] = {}
    known: dict[RequestedArtifact, RequestedArtifact] = {}  # the files of one profile hold nearly the same

    def paths() -> list[Path]:
        listed = REQUESTED.paths(directory)
        if complete and len(listed) > _MOST_FILES:
            raise StoreError(f"{directory}: {len(listed):,} files are too many: run 'kcoord gc', which merges old ones")
        return listed[:_MOST_FILES]

    def read(path: Path) -> bool:
        artifacts = _read(path)
        fits = len(known) + sum(artifact not in known for artifact in artifacts or ()) <= _MOST_KNOWN
        if not fits and complete:
            raise StoreError(f"{path}: with it they are more than {_MOST_KNOWN:,} artifacts: look who writes there")
        found[path] = [
            known.setdefault(artifact, artifact) for artifact in artifacts or [] if fits or artifact in known
        ]
        return artifacts is not None

    with store_errors(directory):
        present = read_all(paths, read)
    if present is not None:
        return {path: found[path] for path in present}
    if complete:
        raise StoreError(f"{directory}: it changes all the time: try again later")
    return found


def _read(path: Path) -> list[RequestedArtifact] | None:
    """None if the file is gone, empty if it cannot be read."""

    def parse(content: bytes) -> list[RequestedArtifact]:
        return [RequestedArtifact.from_wire(entry) for entry in REQUESTED.decode(content)]

    return REQUESTED.read(path, parse, lambda error: None)
