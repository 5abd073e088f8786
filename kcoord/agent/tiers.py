"""Moves artifacts between the local tier, packs and the store.

Disk work runs in threads, the store's apart from the local tier's, so that a stalled NFS server delays neither local
publishing nor a heartbeat.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from kcoord.agent.expectations import Expectations
from kcoord.agent.packs import Packs, UsedArtifacts
from kcoord.agent.store_breaker import StoreBreaker
from kcoord.artifacts import local
from kcoord.artifacts.manifest import Contents, Manifest, Origin
from kcoord.artifacts.signing import OFF
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactDistrusted, ArtifactInvalid, StoreError
from kcoord.keys.cache_key import CacheKey
from kcoord.latest import Latest
from kcoord.telemetry.events import Notices

T = TypeVar("T")

_MOST_DISTRUSTED = 100_000
_MOST_FRESH = 256 << 20  # bytes
_MOST_FRESH_KEYS = 20_000
_TOUCHES_ONE_IN = 16  # of the agents that fetch an artifact


class Tiers:
    """Brings artifacts from packs and the store to this node, and from this node to the store.

    `expectations` learn the compile time that a fetched artifact records, and `used` hears of each artifact that the store has.
    `local_dir` is `Settings.local_dir`. An artifact's place is looked at each time that it is used: it must be this user's alone.
    `required`: signatures are, also without a store; then only homes that this agent has filled are copied.
    """

    def __init__(
        self,
        store: Store | None,
        local_dir: Path | None,
        notices: Notices,
        *,
        expectations: Expectations,
        used: UsedArtifacts,
        required: bool = False,
    ) -> None:
        self.store, self._trust = StoreBreaker(store, notices), store.trust if store is not None else OFF
        self._required = required or self._trust.required
        self._local_dir, self._notices, self._expectations, self._used = local_dir, notices, expectations, used
        self._local_io = ThreadPoolExecutor(4, "local-tier")
        self.packs = Packs(self.store, local_dir if store is not None else None, notices)
        # artifacts that were compiled here and are on their way into the store, alone signed; large ones without contents
        self._fresh: Latest[str, tuple[Manifest, dict[str, bytes] | None]] = Latest(_MOST_FRESH_KEYS)
        self._filled: Latest[str, Path] = Latest(_MOST_FRESH_KEYS)  # key → the home that this agent filled
        self.distrusted: set[str] = set()
        """Keys whose artifact in the store this agent does not trust, and others may."""
        self.refused: set[str] = set()
        """Keys whose artifact is in the store, and was not used, for whatever reason."""
        self.carried: Counter[str] = Counter()
        """For the metrics: artifacts and bytes that were ``published`` and ``fetched``."""
        self.faults: Counter[tuple[str, str]] = Counter()
        """For the metrics: failures of a ``publish`` or ``fetch``, by ``fault`` or ``invalid``."""

    def close(self) -> None:
        """Begin no other work. Does not wait for threads."""
        self._local_io.shutdown(wait=False, cancel_futures=True)
        self.packs.close()
        self.store.close()

    async def publish_locally(
        self, staging: Path, home: Path, key: CacheKey, compile_seconds: float, origin: Origin
    ) -> local.Artifact:
        """Raises `ArtifactInvalid` or `StoreError`."""
        fresh: list[tuple[Manifest, dict[str, bytes] | None]] = []

        def publish() -> local.Artifact:
            local.check_owner(staging)
            local.check_owner(home)
            return local.publish_local(
                staging, home, key, compile_seconds, origin, lambda *published: fresh.append(published)
            )

        artifact = await self.locally(publish)
        for manifest, contents in fresh if self.store.exists else ():
            held = sum(each.size for each, kept in self._fresh.values() if kept is not None)
            self._fresh[key.digest] = manifest, contents if held + manifest.size <= _MOST_FRESH else None
        if fresh:
            self._filled[key.digest] = home
        return artifact

    def stays_here(self, digest: str) -> None:
        """An artifact that was published locally does not go into the store: forget its bytes."""
        self._fresh.pop(digest, None)

    async def bring_home(self, digest: str, there: Path, home: Path) -> bool | None:
        """Copy an artifact of the local tier to another home. False: it cannot be copied. None: it is gone, or damaged."""

        def copy() -> bool | None:
            try:
                local.check_owner(there)
                local.check_owner(home)
                if local.is_whole(home, digest):
                    return True
                if self._required and self._filled.get(digest) != there:
                    return False  # it may be another agent's, with less trust
                found = self._whole(there, digest)
                if found is None:
                    return None
                local.install(*found, home, self._local_dir)
            except ArtifactInvalid as error:
                self._notices.tell(str(error))
                return False
            except StoreError as error:
                self._notices.tell(str(error), about=f"the local directory: {error.remedy}")
                return False
            return True

        return await self.locally(copy)

    def _whole(self, home: Path, digest: str) -> tuple[Manifest, Contents] | None:
        """The artifact at `home`; None if there is none, or a damaged one, which is told."""
        try:
            return local.contents_at(home, digest)
        except ArtifactInvalid as error:
            self._notices.tell(str(error))
            return None

    async def locally(self, work: Callable[[], T]) -> T:
        """The result of `work`, run in a thread for the local tier."""
        return await asyncio.get_running_loop().run_in_executor(self._local_io, work)

    async def from_pack(self, digest: str, home: Path, announced: str) -> bool:
        """Bring the announced artifact from a pack to `home`. False: no pack serves it; it may be in the store all the same."""
        pack = self.packs.stating(digest, announced)
        if pack is None:
            return False

        def bring() -> Manifest | None:
            local.check_owner(home)
            found = pack.fetch(digest, announced)
            if found is None:
                return None
            local.install(found[0], found[1], home, self._local_dir)
            return found[0]

        try:
            manifest = await self.locally(bring)
        except (ArtifactInvalid, StoreError) as error:
            self._notices.tell(f"an artifact of the pack is not used: {error}; it is looked up", about=f"{pack.place}")
            return False
        if manifest is None:
            return False
        self.packs.served(pack.place.stem)
        self._arrived(digest, home, manifest)
        return True

    async def from_store(self, digest: str, home: Path, announced: str | None) -> str | None:
        """Fetch an artifact to `home`; returns the SHA-256 of its manifest, None if the store has no usable one.

        Retention hears of its use: by the leader who finds it, and by one in 16 of the others.
        """

        def fetch(store: Store) -> tuple[Manifest, dict[str, bytes], str] | None:
            with self._counted("fetch"):
                found = store.fetch(digest, announced)
            if found is not None and (announced is None or random.randrange(_TOUCHES_ONE_IN) == 0):
                store.touch(digest)
            return found

        try:
            fetched = await self.store.use(fetch)
            if fetched is None:
                return None
            manifest, contents, stated = fetched

            def install() -> None:
                local.check_owner(home)
                local.install(manifest, contents, home, self._local_dir)

            self._count("fetched", manifest)
            await self.locally(install)
            self._arrived(digest, home, manifest)
            return stated
        except ArtifactDistrusted as error:
            self._refuse(digest)
            if error.unknown_key and len(self.distrusted) < _MOST_DISTRUSTED:
                self.distrusted.add(digest)
            self._notices.tell(f"{error}; kernels are compiled instead", about=f"trust: {error.fault}")
        except ArtifactInvalid as error:
            self._refuse(digest)
            self._notices.tell(f"{error}; the kernel is compiled instead")
        except StoreError as error:
            self._notices.tell(f"{error}; kernels are compiled instead", about=f"the local directory: {error.remedy}")
        return None

    def _refuse(self, digest: str) -> None:
        if len(self.refused) < _MOST_DISTRUSTED:
            self.refused.add(digest)

    async def into_store(self, digest: str, home: Path) -> str | None:
        """Publish the artifact at `home`; returns the SHA-256 of the store's manifest, None if it did not get there.

        Only an artifact that was compiled here is published; with a key, one that this agent has just put there. Another may have
        come from a store that this node trusts no more.
        """

        fresh = self._fresh.pop(digest, None)

        def publish(store: Store) -> tuple[str, Manifest | None] | None:
            local.check_owner(home)
            found: tuple[Manifest, Contents] | None
            if fresh is not None and fresh[1] is not None:
                found = fresh[0], fresh[1]
            elif (found := local.contents_at(home, digest)) is None:
                return None
            manifest = found[0]
            if not manifest.made_here or (fresh is None and self._trust.signer):
                stated = store.stated(digest)
                return None if stated is None else (stated[1], None)
            with self._counted("publish"):
                return store.publish(*found), manifest

        try:
            published = await self.store.use(publish)
            if published is None:
                return None
            announced, manifest = published
            if manifest is not None:
                self._count("published", manifest)
            self._used.stored(digest)
            return announced
        except ArtifactDistrusted as error:
            self._notices.tell(f"{error}; kernels stay on this node", about=f"not published: {error.fault}")
        except ArtifactInvalid as error:
            self._notices.tell(f"not published: {error}")
        return None

    def _arrived(self, digest: str, home: Path, manifest: Manifest) -> None:
        """The artifact is at `home`, from a pack or the store."""
        self._filled[digest] = home
        self._expectations.learn(digest, manifest.compile_seconds)
        self._used.stored(digest)

    def _count(self, how: str, manifest: Manifest) -> None:
        self.carried[f"{how}_artifacts"] += 1
        self.carried[f"{how}_bytes"] += manifest.size

    @contextmanager
    def _counted(self, operation: str) -> Iterator[None]:
        """Counts the failures of `operation`."""
        try:
            yield
        except (StoreError, ArtifactInvalid) as error:
            self.faults[operation, "fault" if isinstance(error, StoreError) else "invalid"] += 1
            raise
