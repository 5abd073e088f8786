"""Verified artifacts of this node, which are not read again while their files are the same.

To verify an artifact is to read and hash all of its files, which its compiler then reads once more. So one entry of the machine's
cache (`kcoord.keys.tools.machine_cache`) lists artifacts that a process has verified, with the identities that their files had:
device, inode, size, and both times of change. Another process reads the list once; a listed artifact costs one `lstat` for each
file and directory, and an open of its manifest, which a client of a network file system checks with the server. Owners and modes
are judged each time. A write to a file, or another file in its place, changes the ctime, which no program can choose. Then the
artifact is read and hashed as one that is not listed.

An entry counts for a day, and until the machine boots. Not seen until then: bits that flip on the disk without a write, or are
written past the file system, or through a mapping that this user had made before; and on a network file system what
`kcoord.keys.tools.machine_cache` does not see either.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import msgpack

from kcoord.artifacts.local import Artifact, identity_of, open_artifact
from kcoord.artifacts.manifest import MANIFEST_NAME, FileEntry, Manifest, Origin
from kcoord.files.daemon import Deferred
from kcoord.files.private import check_directory, check_folders, check_ours
from kcoord.files.reading import status_of
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.tools.machine_cache import keep, kept

_NAME = "verified-4"
_MOST = 2048  # artifacts, in 3 MB, which each process reads
_LASTS = 24 * 3600  # seconds
_SAVED_WITHIN = 5.0  # seconds that the end of a process waits for a save that is under way
_SAVED_AFTER = 5.0  # seconds from the first of several artifacts

_UNUSABLE = (OSError, ValueError, TypeError, LookupError, ArithmeticError, msgpack.exceptions.UnpackException)
"""Errors of a list that is no list of ours, and of files that are not there: the artifact is read."""

_Entry = tuple[int, bytes]
"""The time when an artifact was verified (Unix seconds), and the artifact."""


class Verified:
    """The list of verified artifacts, as one process sees it. Thread-safe and fork-safe.

    With `strict` nothing is listed, and each artifact is read. Not guaranteed: that a verified artifact is listed; of two
    processes that save at once one may lose its own.
    """

    def __init__(self, local_dir: Path, *, strict: bool) -> None:
        self._local_dir, self._strict = local_dir, strict
        self._entries: dict[bytes, _Entry] | None = None
        self.forget_after_fork()

    def forget_after_fork(self) -> None:
        """The parent saves its own."""
        self._new: dict[bytes, _Entry] = {}
        self._saving = Deferred(_SAVED_AFTER, self.save)

    def open(self, home: Path, key: CacheKey) -> Artifact | None:
        """As `open_artifact`, but one that is listed is not read, and its manifest is without details."""
        if self._strict:
            return open_artifact(home, key.digest)
        if self._entries is None:
            self._entries = self._read()
        artifact = self._listed(self._entries, home, key)
        if artifact is None:
            artifact = open_artifact(home, key.digest)
            if artifact is not None and artifact.identities and home.is_absolute():
                self._add(self._entries, artifact)
        return artifact

    def _listed(self, entries: dict[bytes, _Entry], home: Path, key: CacheKey) -> Artifact | None:
        root = os.fspath(home)
        verified, packed = entries.get(os.fsencode(root), (0, b""))
        if not packed or not _counts(verified):
            return None
        try:
            digest, identities, files, seconds, origin, *rest = msgpack.unpackb(packed, use_list=False)
            if digest != key.digest:
                return None
            check_directory(root)
            statuses = [status_of(f"{root}/{MANIFEST_NAME}")]
            for name, *_ in files:
                check_folders(root, name)
                statuses.append(os.lstat(f"{root}/{name}"))
            if tuple(map(identity_of, statuses)) != identities:
                return None
            for found in statuses:
                check_ours(root, found)
            plain = tuple(map(FileEntry._make, files))
            manifest = Manifest(key, plain, seconds, Origin(*origin), b"", *rest)
        except _UNUSABLE as error:
            let_through(error)
            return None
        if not _counts(max([found.st_atime for found in statuses])):
            return None  # read it: by its access times the collector knows what a rank is about to load
        return Artifact(home, manifest)

    def _add(self, entries: dict[bytes, _Entry], artifact: Artifact) -> None:
        manifest = artifact.manifest
        packed = msgpack.packb([
            manifest.key.digest, artifact.identities, manifest.files, manifest.compile_seconds, manifest.origin,
            manifest.targets, manifest.made_here, manifest.needs,
        ])  # fmt: skip
        entry = int(time.time()), packed
        home = os.fsencode(artifact.path)
        entries[home] = self._new[home] = entry
        self._saving.begin()

    def save(self) -> None:
        """Add this process's artifacts to the list that the others read."""
        new, self._new = self._new, {}
        new, boot = dict(new), _boot()  # another thread may be about to add to it
        if not new or not boot:
            return
        listed = self._read()
        if all(home in listed and listed[home][1] == packed for home, (_, packed) in new.items()):
            return  # a process beside this one was faster
        listed |= new
        newest = sorted(listed.items(), key=lambda each: each[1][0])[-_MOST:]
        keep(self._local_dir, _NAME, [boot, newest])

    def close(self) -> None:
        self._saving.end(_SAVED_WITHIN)  # a save that the interpreter's end stops leaves its part behind
        self.save()

    def _read(self) -> dict[bytes, _Entry]:
        entry: Any = kept(self._local_dir, _NAME)
        try:
            if not entry or entry[0] != _boot():
                return {}
            return {home: (when, packed) for home, (when, packed) in entry[1] if _counts(when)}
        except _UNUSABLE as error:
            let_through(error)
            return {}


def _counts(verified: float) -> bool:
    return 0 <= time.time() - verified < _LASTS


def _boot() -> str:
    """This boot of the machine; empty if that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError as error:
        let_through(error)
        return ""
