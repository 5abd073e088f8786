"""Kernels that this node compiled before it had the store, or while the store had a fault: published once a rank uses them.

A rank finds such a kernel on its node, and so never asks for it. Other nodes would compile it again.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from kcoord.agent.chores.chore import REST, Chore, Lane
from kcoord.artifacts import local
from kcoord.artifacts.catalog import local_manifests
from kcoord.artifacts.choices import node_decided
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files.atomic import replace_file
from kcoord.files.reading import read_plain
from kcoord.retention.uses import PREFIX, prefix_of
from kcoord.telemetry.events import Notices, log

FIRST, EVERY = 30.0, 60.0  # seconds; a job that has just begun has better things to do
_AT_THE_END = 5.0  # seconds of the last pass
_MOST_REFUSED = 3  # of a pass; then the store takes nothing
_MOST = 100_000  # artifacts that are known to be in the store, some 70 bytes each
_DIRECTORY = "in-store"


class LatePublishes:
    """Publishes to `store` those of the used artifacts in `local_dir` that this node compiled, and that never got there.

    A mark on the node's disk remembers them by store: a job whose kernels are marked costs the store nothing. Not published:
    artifacts that came from a store (a signature is not this node's to give), and those around which others may write. One that
    the store refuses is tried again in the next pass. No method raises for a disk's sake. ``usable()`` is false while the store
    has a fault.
    """

    def __init__(self, store: Store | None, local_dir: Path, usable: Callable[[], bool], notices: Notices) -> None:
        self._store, self._local_dir, self._usable = store, local_dir, usable
        self._there: set[bytes] = set()  # prefixes of digests that are in the store, or are not to be published
        self._unsure: set[bytes] = set()
        self._nowhere: set[bytes] = set()  # prefixes of which this process sees no artifact
        self._marks: Path | None = None  # once they are read
        self._marked = 0  # of `_there`
        self._lane = Lane("late-publishes", low_priority=True)
        chore = Chore(
            "late publishes", self._lane, functools.partial(self._pass, None), notices, first=FIRST, every=EVERY, rest=REST,
            wanted=lambda: bool(self._unsure) and usable(), last=functools.partial(self._pass, _AT_THE_END),
        )  # fmt: skip
        self.chores = [chore] if store is not None else []

    def used(self, digests: Iterable[str]) -> None:
        """Ranks have loaded the artifacts that begin with these 16 digits. A text that is none is ignored."""
        for digest in digests if self._store is not None else ():
            with suppress(ValueError):
                prefix = prefix_of(digest)
                known = prefix in self._there or prefix in self._nowhere
                if not known and len(self._unsure) + len(self._nowhere) < _MOST:
                    self._unsure.add(prefix)

    def published(self, digest: str) -> None:
        """The artifact is in the store."""
        if self._store is not None and len(self._there) < _MOST:
            self._there.add(prefix_of(digest))

    async def _pass(self, within: float | None) -> None:
        if not self._usable() or not (self._unsure or len(self._there) != self._marked):
            return
        unsure, known = frozenset(self._unsure), frozenset(self._there)
        self._unsure.clear()
        there, refused, nowhere = await self._lane.run(functools.partial(self._publish, unsure, known, within))
        self._there |= there
        self._unsure |= refused
        self._nowhere |= nowhere

    def _publish(
        self, unsure: frozenset[bytes], known: frozenset[bytes], within: float | None
    ) -> tuple[set[bytes], set[bytes], set[bytes]]:
        """The prefixes of artifacts that need no further look, that the store refused, and that are not on this node."""
        store = self._store
        assert store is not None
        if not store.opened or store.reads_only is not None:
            return set(), set(unsure), set()
        there = set(known)
        if self._marks is None:
            self._marks = self._local_dir / _DIRECTORY / hashlib.sha256(store.uuid.encode()).hexdigest()[:32]
            there |= (marked := _read_marks(self._marks))
            self._marked = len(marked)
        left, ends = set(unsure - there), None if within is None else time.monotonic() + within
        refused: set[bytes] = set()
        for path in local_manifests(self._local_dir) if left else ():
            if len(refused) >= _MOST_REFUSED or (ends is not None and time.monotonic() > ends):
                refused |= left
                left.clear()
                break
            with suppress(ArtifactInvalid, OSError):  # it is damaged, or being removed: its reader says so
                manifest = Manifest.read(path.parent)
                prefix = prefix_of(manifest.key.digest)
                if prefix in left and path.parent != node_decided(self._local_dir, manifest.key.digest):
                    left.discard(prefix)
                    try:
                        if manifest.made_here and not manifest.unvouched:
                            self._publish_one(store, path.parent, manifest.key.digest)
                    except StoreError as error:  # the agent's other uses of the store tell it
                        log.info("late publishes: %s", error)
                        refused.add(prefix)
                    else:
                        there.add(prefix)
        if len(there) != self._marked:
            _write_marks(self._marks, there)
            self._marked = len(there)
        return there, refused, left

    def _publish_one(self, store: Store, home: Path, digest: str) -> None:
        """Raises `StoreError`, `ArtifactInvalid` and OSError."""
        local.check_owner(home, self._local_dir)
        found = local.contents_at(home, digest)
        if found is not None:
            store.publish(*found)
            log.info("published late: %s", found[0].key.name)


def _read_marks(path: Path) -> set[bytes]:
    """The marks; none if they cannot be read: then each artifact is published once more, which finds it there."""
    try:
        content = read_plain(path, _MOST * PREFIX)
    except (ArtifactInvalid, OSError):
        return set()
    return {content[start : start + PREFIX] for start in range(0, len(content) - len(content) % PREFIX, PREFIX)}


def _write_marks(path: Path, prefixes: set[bytes]) -> None:
    with suppress(OSError):  # a full disk costs another look
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(path, b"".join(sorted(prefixes)[:_MOST]))
