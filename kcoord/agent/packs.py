"""The packs of the profiles that this agent's jobs named: a source of artifacts in front of the store.

A pack is read in the background, as soon as its profile is known, while the ranks import torch. It then answers for a key that
it states as a lease service that says READY: nobody else is asked, and the artifact comes from the copy on this node's disk. One
that does not verify is fetched from the store, and so on: the usual way.

A node that has had a pack's artifacts before may have them all: there the pack is read once a rank asks for one.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kcoord.agent.store_breaker import StoreBreaker
from kcoord.artifacts import local
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid, StoreError
from kcoord.files import beneath
from kcoord.files.daemon import in_daemon
from kcoord.latest import Latest
from kcoord.packs.index import PackInvalid
from kcoord.packs.pack import Pack, read_pack
from kcoord.packs.pack_files import newest_pack, note_here, was_here
from kcoord.telemetry.events import Notices, tell_if_failed

_PATIENCE = 1.0  # seconds from the beginning of a read in which claims wait for it: hundreds of look-ups take longer
_ATTEMPTS, _AGAIN = 30, 2.0  # seconds; a store that opens late is that of a large job
_KEPT = 1800.0  # seconds; then the job has started, and the copy gives its space back
_MOST = 4  # profiles at a time
_MOST_NAMED = 64  # profiles

At = Callable[[tuple[Path, ...], Callable[[], "Manifest | None"]], Awaitable["Manifest | None"]]


class Packs:
    """A fault costs look-ups, and is told once.

    ``at(homes, work)`` runs `work` in a thread for the local tier; it raises `ArtifactInvalid` if others may write there.
    """

    def __init__(self, store: StoreBreaker, at: At, local_dir: Path | None, notices: Notices) -> None:
        self._store, self._at, self._local_dir, self._notices = store, at, local_dir, notices
        self._named: Latest[str, None] = Latest(_MOST_NAMED)  # profiles of this agent's jobs
        self._reads: dict[str, asyncio.Future[Pack | None]] = {}  # by profile, as long as the packs serve
        self._timers: dict[str, asyncio.TimerHandle] = {}  # by profile: the end of its pack
        self._put_off: set[str] = set()  # profiles whose packs are read once a rank asks
        self._patient_until = 0.0
        self._served: set[str] = set()  # names of packs

    def begin(self, profile: str, *, asked: bool = False) -> None:
        """Read the profile's pack, unless that was begun before. Returns at once. `asked`: a rank has asked for a key."""
        self._named[profile] = None
        if profile in self._reads or len(self._reads) >= _MOST or self._local_dir is None:
            return
        self._patient_until = time.monotonic() + _PATIENCE
        self._reads[profile] = task = asyncio.create_task(self._read(profile, self._local_dir, asked))
        task.add_done_callback(
            functools.partial(tell_if_failed, consequence="artifacts are looked up", tell=self._notices.tell)
        )
        self._stop_timer(profile)
        self._timers[profile] = asyncio.get_running_loop().call_later(_KEPT, self._end, profile)

    def get(self, profile: str) -> Pack | None:
        """The profile's pack. None: there is none that can be used, it is not read yet, or it has served its time."""
        return _result(self._reads.get(profile))

    def status(self) -> dict[str, dict[str, Any]]:
        """The packs that serve, by profile."""
        packs = {profile: _result(read) for profile, read in self._reads.items()}
        return {
            profile: {"artifacts": len(pack.digests), "file": pack.place.name}
            for profile, pack in packs.items()
            if pack is not None
        }

    def is_unread(self, profile: str) -> bool:
        """True as long as the pack is being read."""
        read = self._reads.get(profile)
        return read is not None and not read.done()

    async def announced(self, digest: str) -> str | None:
        """The SHA-256 of the manifest that a pack states for the key `digest`; None if none does, as far as is known in time."""
        while self._put_off:
            profile = self._put_off.pop()
            self._reads.pop(profile, None)
            self.begin(profile, asked=True)
        if reading := [read for read in self._reads.values() if not read.done()]:
            await asyncio.wait(reading, timeout=max(0.0, self._patient_until - time.monotonic()))
        return next((found for pack in self._packs() if (found := pack.announced(digest))), None)

    async def bring(self, digest: str, home: Path, announced: str) -> Manifest | None:
        """Bring the artifact of the key `digest` whose manifest has the SHA-256 `announced` to `home`, and return its manifest.

        None: no pack serves it. It may be in the store all the same.
        """
        pack = next((pack for pack in self._packs() if pack.announced(digest) == announced), None)
        if pack is None:
            return None

        def bring() -> Manifest | None:
            found = pack.fetch(digest, announced)
            if found is not None:
                local.install(found[0], found[1], home, self._local_dir)
            return None if found is None else found[0]

        try:
            manifest = await self._at((home,), bring)
        except (ArtifactInvalid, StoreError) as error:
            self._notices.tell(f"an artifact of the pack is not used: {error}; it is looked up", about=f"{pack.place}")
            return None
        if manifest is not None:
            self.served(pack.place.stem)
        return manifest

    async def touch(self) -> None:
        """Tell retention that the packs of this agent's jobs are in use."""

        def touch(store: Store) -> None:
            for profile in list(self._named):
                with suppress(OSError, StoreError):
                    if (path := newest_pack(store.root, profile, store.trust)) is not None:
                        beneath.mark_used(path, store.root)

        await self._store.use(touch)

    def served(self, name: str) -> None:
        """This node's ranks have got artifacts of the pack `name`, or made them."""
        if name not in self._served and self._local_dir is not None:
            self._served.add(name)
            in_daemon(functools.partial(note_here, self._local_dir, name))

    def close(self) -> None:
        """Give the copies' space back."""
        for profile in list(self._reads):
            self._end(profile)

    async def _read(self, profile: str, local_dir: Path, asked: bool) -> Pack | None:
        def read(store: Store) -> tuple[Pack | None, bool]:
            if not asked and was_here(store.root, profile, store.trust, local_dir):
                return None, True
            return read_pack(store, profile, local_dir), False

        pack, put_off = None, False
        try:
            for _ in range(_ATTEMPTS):
                if (found := await self._store.use(read)) is not None:
                    pack, put_off = found
                    break
                await asyncio.sleep(_AGAIN)
            self._put_off |= {profile} if put_off else set()
        except PackInvalid as error:
            self._notices.tell(f"the pack of {profile} is not used: {error}; its artifacts are looked up")
        return pack

    def _packs(self) -> Iterator[Pack]:
        return (pack for read in self._reads.values() if (pack := _result(read)) is not None)

    def _stop_timer(self, profile: str) -> None:
        timer = self._timers.pop(profile, None)
        if timer is not None:
            timer.cancel()

    def _end(self, profile: str) -> None:
        self._stop_timer(profile)
        read = self._reads.pop(profile, None)
        pack = _result(read)
        if pack is not None:
            in_daemon(pack.close)  # a thread may be reading it, from a disk that hangs
        elif read is not None:
            read.cancel()


def _result(read: asyncio.Future[Pack | None] | None) -> Pack | None:
    """None too as long as it is being read, and after a failure."""
    if read is None or not read.done() or read.cancelled() or read.exception() is not None:
        return None
    return read.result()
