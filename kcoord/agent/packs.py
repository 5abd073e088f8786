"""The packs of the profiles that this agent's jobs named: a source of artifacts in front of the store, and what the next lists.

A pack is read in the background, as soon as its profile is known, while the ranks import torch. It then answers READY for each
key that it states: no lease service is asked, and the artifact comes from the copy on this node's disk. An artifact that does not
verify is fetched from the store.

A node that has had a pack's artifacts before may have them all: there the pack is read once a rank asks for one.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from kcoord.agent.store_breaker import StoreBreaker
from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.files import beneath
from kcoord.files.daemon import in_daemon
from kcoord.latest import Latest
from kcoord.packs.index import MOST_LISTED, PackInvalid, Use, is_digest, is_place
from kcoord.packs.pack import Pack, read_pack
from kcoord.packs.pack_files import newest_pack, note_here, was_here
from kcoord.packs.recipe import today
from kcoord.telemetry.events import Notices, tell_if_failed

_PATIENCE = 1.0  # seconds from the beginning of a read in which claims wait for it: hundreds of look-ups take longer
_ATTEMPTS, _AGAIN = 30, 2.0  # seconds; a store that opens late is that of a large job
_KEPT = 1800.0  # seconds; then the job has started, and the copy gives its space back
_MOST = 4  # profiles at a time
_MOST_NAMED = 64  # profiles


class Packs:
    """The packs of one agent, each for `kept` seconds; none without a `local_dir`. After a fault artifacts are looked up."""

    def __init__(self, store: StoreBreaker, local_dir: Path | None, notices: Notices, kept: float = _KEPT) -> None:
        self._store, self._local_dir, self._notices, self._kept = store, local_dir, notices, kept
        self._named: Latest[str, None] = Latest(_MOST_NAMED)  # profiles of this agent's jobs
        self._reads: dict[str, asyncio.Future[Pack | None]] = {}  # by profile, as long as the packs serve
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
        asyncio.get_running_loop().call_later(self._kept, self._end, profile, task)

    def get(self, profile: str) -> Pack | None:
        """The profile's pack, unless it cannot be used, is not read yet, or has served its time."""
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
        """The SHA-256 of the manifest that a pack states for the key `digest`; None if none does.

        Waits for packs that are being read, for a second at most.
        """
        while self._put_off:
            profile = self._put_off.pop()
            self._reads.pop(profile, None)
            self.begin(profile, asked=True)
        if reading := [read for read in self._reads.values() if not read.done()]:
            await asyncio.wait(reading, timeout=max(0.0, self._patient_until - time.monotonic()))
        return next((found for pack in self._packs() if (found := pack.announced(digest))), None)

    def stating(self, digest: str, announced: str) -> Pack | None:
        """The pack that has the artifact of the key `digest` whose manifest has the SHA-256 `announced`."""
        return next((pack for pack in self._packs() if pack.announced(digest) == announced), None)

    async def touch(self) -> None:
        """Tell retention that the packs of this agent's jobs are in use."""

        def touch(store: Store) -> None:
            for profile in list(self._named):
                with suppress(OSError, StoreError):
                    if (path := newest_pack(store.root, profile, store.trust)) is not None:
                        beneath.mark_used(path, store.root)

        await self._store.use(touch)

    def served(self, name: str) -> None:
        """Note that this node has had the artifacts of the pack `name`."""
        if name not in self._served and self._local_dir is not None:
            self._served.add(name)
            in_daemon(functools.partial(note_here, self._local_dir, name))

    def close(self) -> None:
        """Give the copies' space back."""
        for profile, read in list(self._reads.items()):
            self._end(profile, read)

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

    def _end(self, profile: str, read: asyncio.Future[Pack | None]) -> None:
        if self._reads.get(profile) is not read:
            return  # it was read again since
        del self._reads[profile]
        if (pack := _result(read)) is not None:
            in_daemon(pack.close)  # a thread may be reading it, from a disk that hangs
        else:
            read.cancel()


def _result(read: asyncio.Future[Pack | None] | None) -> Pack | None:
    """The pack; None as long as it is being read, and after a failure."""
    if read is None or not read.done() or read.cancelled() or read.exception() is not None:
        return None
    return read.result()


class UsedArtifacts:
    """Artifacts that ranks asked for and the store has: the latest, a bounded number.

    `count` grows with each new one, and `asks` with each that a rank asks for first, in the store or not.
    """

    def __init__(self, local_dir: Path) -> None:
        self._below = f"{local_dir}{os.sep}"
        self._homes: Latest[str, str] = Latest(MOST_LISTED)  # by digest: all that ranks asked for
        self._stored: Latest[str, None] = Latest(MOST_LISTED)  # digests
        self._loaded: Latest[str, None] = Latest(MOST_LISTED)  # prefixes of digests
        self.count = self.asks = 0

    def asked(self, digest: str, home: str) -> None:
        """A rank asked for the artifact of the key `digest`, for `home`."""
        if digest not in self._homes:
            self.asks += 1
            self.count += digest in self._stored
        self._homes[digest] = home

    def stored(self, digest: str) -> None:
        """The store has the artifact: this agent has published it, or fetched it from there or from a pack."""
        self.count += digest in self._homes and digest not in self._stored
        self._stored[digest] = None

    def loaded(self, digests: Iterable[str]) -> None:
        """Ranks loaded the artifacts whose digests have these prefixes, from this node's disk or elsewhere."""
        for digest in digests:
            self._loaded[digest] = None

    def uses(self) -> list[Use]:
        """The artifacts, the latest asked for first, as used today. One outside the local directory has no place."""
        day, found = today(), []
        for digest, home in reversed(self._homes.items()):
            if digest in self._stored and is_digest(digest):
                place = home[len(self._below) :] if home.startswith(self._below) else ""
                found.append(Use(digest, place if is_place(place) else "", day))
        return found

    @property
    def loads(self) -> frozenset[str]:
        """Prefixes of the digests of artifacts that ranks loaded."""
        return frozenset(self._loaded.keys())
