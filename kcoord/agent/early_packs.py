"""Packs that are written while the job still compiles: a store serves a large cluster slower than the cluster compiles.

Each node fetches each new kernel, eight requests: of a server's 60,000 requests a second, 1,250 nodes get six kernels a second
each. A pack costs a node some twenty requests. So an agent that has much to fetch, at the pace at which its fetches come, has the
profile's pack written of all that is READY. One agent at a time writes, by a lease. The news of that lease holds the others'
fetches back, or the writer would be as slow as they are; its end tells them to read the pack.

A pack that does not come in time, or lacks a key, costs a fetch that time, once: then it goes to the store.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from typing import Protocol

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import LeaseService, Wait
from kcoord.telemetry.events import tell_if_failed

FEWEST = 8  # artifacts; fewer are not worth a file
_FEWEST_AGENTS = 8  # that hear of a pack
_HELD_BACK, _READ_WITHIN = 3.0, 3.0  # seconds for which fetches wait for a writer, and then for their pack, at most
_WORTH = 1.0  # seconds of fetches that a pack is to spare this node
_WAITS = 0.5  # seconds of fetches; a node that has less before it is not held back
_TIMES_ITS_READ = 2.0  # and so many times as long as it took to read the last one
_WEIGHT = 0.25  # of the latest fetch in the mean
_COUNTS_EVERY = 0.1  # seconds between two counts of what is to be fetched


def lease_of(profile: str) -> str:
    """The key of the lease to write the pack of `profile`."""
    return f"pack {profile}"


class Packs(Protocol):
    """This node's copies of packs."""

    @property
    def seen(self) -> Container[str]:
        """The keys whose artifacts this node has."""

    def states(self, digest: str) -> bool:
        """True if a pack has the artifact of the key `digest`."""

    async def renew(self, profile: str) -> None:
        """Read the profile's newest pack, unless that was read. A fault is told, and is no exception."""


class EarlyPacks:
    """The packs of `profile`; without one, or without news of leases, there are none.

    ``write()`` is called when a pack is worth its writing, again and again as long as it is.
    """

    def __init__(
        self, leases: LeaseService, profile: str | None, packs: Packs, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._leases, self._profile, self._packs, self._clock = leases, profile, packs, clock
        self.write: Callable[[], object] = lambda: None
        self._begun: dict[object, float] = {}  # the fetches under way, the oldest first
        self._pace = 0.0  # seconds from one fetch to the next, of late; 0: none has ended
        self._read = 0.0  # seconds, of the last pack
        self._timer: asyncio.TimerHandle | None = None  # of the next count
        self._number = -1  # of the news by which the last pack was read
        self._left_out: set[str] = set()  # keys that were READY before a pack was written, and are not in it
        self._late = ""  # the holder of the lease that nobody waits for any more
        self._coming: asyncio.Task[None] | None = None
        self._until = 0.0  # fetches wait for it

    def wanted(self) -> list[str]:
        """The keys that a pack is to have; empty if it is not worth its writing."""
        ready, left, takes = self._to_fetch()
        return ready if left >= FEWEST and takes > max(_WORTH, _TIMES_ITS_READ * self._read) else []

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Around each fetch from the store."""
        fetch = object()
        self._begun[fetch] = self._clock()
        others = len(self._begun)
        self._count_later()
        try:
            yield
        finally:
            abreast = max(others, len(self._begun))
            seconds = self._clock() - self._begun.pop(fetch)
            self._pace += _WEIGHT * (seconds / abreast - self._pace) if self._pace else seconds / abreast

    def _count_later(self) -> None:
        if self._timer is None and self._profile is not None:
            self._timer = asyncio.get_running_loop().call_later(_COUNTS_EVERY, self._count)

    def _count(self) -> None:
        self._timer = None
        if self.wanted():
            self.write()
        if self._begun:
            self._count_later()

    async def came(self, digest: str) -> bool:
        """Wait for the pack that another agent is writing. True: a pack has the artifact of the key `digest`."""
        if self._profile is None or (heard := self._leases.heard(lease_of(self._profile))) is None:
            return False
        if self._coming is None or self._coming.done():
            if isinstance(heard.answer, Wait):
                waits = heard.answer.holder != self._late and self._has_much_to_fetch()
            else:
                waits = heard.number != self._number
            if not waits:
                return self._packs.states(digest)
            self._until = self._clock() + _HELD_BACK + _READ_WITHIN
            self._coming = asyncio.create_task(self._come(self._profile))
            self._coming.add_done_callback(lambda task: tell_if_failed(task, "packs of this job are not awaited"))
        await asyncio.wait({self._coming}, timeout=max(0.0, self._until - self._clock()))
        return self._packs.states(digest)

    def _to_fetch(self) -> tuple[list[str], int, float]:
        """The keys that are READY, how many of them this node lacks, and the seconds that these take at the pace of late."""
        if self._profile is None or self._leases.followers < _FEWEST_AGENTS:
            return [], 0, 0.0
        ready = self._leases.ready_keys()
        left = sum(
            digest not in self._packs.seen and digest not in self._left_out and not self._packs.states(digest)
            for digest in ready
        )
        oldest = self._clock() - next(iter(self._begun.values())) if self._begun else 0.0
        return ready, left, left * max(self._pace, oldest / max(1, len(self._begun)))

    def _has_much_to_fetch(self) -> bool:
        """True too as long as no fetch has told how long they take: ours would slow the writer down."""
        _, left, takes = self._to_fetch()
        return left > 0 and (not self._pace or takes > _WAITS)

    def close(self) -> None:
        """Hold nothing back any more."""
        self._profile = None
        if self._timer is not None:
            self._timer.cancel()
        if self._coming is not None:
            self._coming.cancel()

    async def _come(self, profile: str) -> None:
        """Wait until the writer's lease ends, and read the pack."""
        lease, end, holder = lease_of(profile), self._clock() + _HELD_BACK, ""
        before: list[str] = []
        try:
            async with self._leases.watch(lease) as watch:
                while (heard := self._leases.heard(lease)) is not None and isinstance(heard.answer, Wait):
                    if not holder:
                        holder, before = heard.answer.holder, self._leases.ready_keys()
                    if heard.answer.holder != holder:  # the next one writes
                        break
                    if self._clock() >= end:
                        self._late = holder
                        return
                    await watch.changed(end - self._clock())
        except LeaseUnavailable:
            return
        if heard is not None:
            self._number, self._late = heard.number, ""
            begun = self._clock()
            await self._packs.renew(profile)
            self._read = self._clock() - begun
            if before:
                self._left_out = {digest for digest in before if not self._packs.states(digest)}
