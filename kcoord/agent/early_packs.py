"""Packs that are written while the job still compiles: a store serves a large cluster slower than the cluster compiles.

Each node fetches each new kernel, eight requests: of a server's 60,000 requests a second, 1,250 nodes get six kernels a second
each. A pack costs a node some twenty requests. So an agent that has much to fetch, at the pace at which its fetches come, has the
profile's pack written of all that is READY. One agent at a time writes, by a lease. The news of that lease holds the others'
fetches back, or the writer would be as slow as they are; its end tells them to read the pack.

What does not pay is left alone for ten times as long as it took: waiting for a pack that came too late, or brought less than was
fetched in that time, and writing one that the store did not take.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager

from kcoord.agent.packs import Packs
from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import LeaseService, Wait
from kcoord.telemetry.events import tell_if_failed

FEWEST = 8  # artifacts; fewer are not worth a file
_FEWEST_AGENTS = 8  # that hear of a pack
_HELD_BACK, _READ_WITHIN = 3.0, 3.0  # seconds for which fetches wait for a writer, and then for their pack, at most
_GATHERED_WITHIN = 1.5  # seconds; the writer leaves the rest to the next pack
_WORTH = 1.0  # seconds of fetches that a pack is to spare this node
_WAITS = 0.5  # seconds of fetches; a node that has less before it is not held back
_TIMES_ITS_READ = 2.0  # and so many times as long as it took to read the last one
_RESTS = 10.0  # times as long as what did not pay
_FRESH = 2.0  # seconds; the pace of earlier fetches says nothing
_WEIGHT = 0.25  # of the latest fetch in the mean
_COUNTS_EVERY = 0.1  # seconds between two counts of what is to be fetched


def lease_of(profile: str) -> str:
    """The key of the lease to write the pack of `profile`."""
    return f"pack {profile}"


class EarlyPacks:
    """The packs of `profile`; without one, or without news of leases, there are none.

    ``write()`` is called when a pack is worth its writing, again and again as long as it is; then `wrote` or `failed`.
    """

    def __init__(
        self, leases: LeaseService, profile: str | None, packs: Packs, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._leases, self._profile, self._packs, self._clock = leases, profile, packs, clock
        self.write: Callable[[], object] = lambda: None
        self._begun: dict[object, float] = {}  # the fetches under way, the oldest first
        self._pace = 0.0  # seconds from one fetch to the next, of late; 0: none has ended
        self._ended = -math.inf  # the last fetch
        self._read = 0.0  # seconds, of the last pack
        self._timer: asyncio.TimerHandle | None = None  # of the next count
        self._number = -1  # of the news by which the last pack was read
        self._left_out: set[str] = set()  # keys that were READY before a pack was written, and are not in it
        self._rests_until = -math.inf
        self._coming: asyncio.Task[None] | None = None
        self._until = 0.0  # fetches wait for it

    # The fetches before this node.

    def wanted(self) -> list[str]:
        """The keys that a pack is to have; empty if it is not worth its writing."""
        ready, left, takes = self._to_fetch()
        pays = left >= FEWEST and takes > max(_WORTH, _TIMES_ITS_READ * self._read)
        return ready if pays and self._clock() >= self._rests_until else []

    @property
    def gathered_within(self) -> float:
        """Seconds for which the writer reads artifacts."""
        return _GATHERED_WITHIN

    def wrote(self, keys: Iterable[str], written: Container[str]) -> None:
        """Of `keys`, in this order, a pack has those in `written`."""
        self._left_out = _passed_over([digest for digest in keys if not self._packs.states(digest)], written)

    def failed(self, seconds: float) -> None:
        """A pack could not be written; it took so long to find that out."""
        self._rest(max(seconds, _WORTH))

    @contextmanager
    def fetching(self) -> Iterator[None]:
        """Around each fetch from the store."""
        fetch = object()
        if not self._is_fresh():
            self._pace = 0.0
        self._begun[fetch] = self._clock()
        others = len(self._begun)
        self._count_later()
        try:
            yield
        finally:
            abreast, now = max(others, len(self._begun)), self._clock()
            pace = (now - self._begun.pop(fetch)) / abreast
            self._pace += _WEIGHT * (pace - self._pace) if self._pace else pace
            self._ended = now

    def _count_later(self) -> None:
        if self._timer is None and self._profile is not None:
            self._timer = asyncio.get_running_loop().call_later(_COUNTS_EVERY, self._count)

    def _count(self) -> None:
        self._timer = None
        if self.wanted():
            self.write()
        if self._begun:
            self._count_later()

    def _to_fetch(self) -> tuple[list[str], int, float]:
        """The keys that are READY, how many of them this node lacks, and the seconds that these take at the pace of late.

        Nothing is to be fetched by a node that has fetched nothing of late: its ranks have what they need.
        """
        idle = self._pace > 0 and not self._is_fresh()
        if self._profile is None or self._leases.followers < _FEWEST_AGENTS or idle:
            return [], 0, 0.0
        ready = self._leases.ready_keys()
        left = sum(
            digest not in self._packs.seen and digest not in self._left_out and not self._packs.states(digest)
            for digest in ready
        )
        pace = self._pace
        if self._begun:  # they may all be slower than the last ones
            since = max(self._ended, next(iter(self._begun.values())))
            pace = max(pace, (self._clock() - since) / len(self._begun))
        return ready, left, left * pace

    def _is_fresh(self) -> bool:
        return bool(self._begun) or self._clock() < self._ended + _FRESH

    def _has_much_to_fetch(self) -> bool:
        """True too as long as no fetch has told how long they take: ours would slow the writer down."""
        _, left, takes = self._to_fetch()
        return left > 0 and (not self._pace or takes > _WAITS)

    # Another agent's pack.

    async def came(self, digest: str) -> bool:
        """Wait for the pack that another agent is writing. True: a pack has the artifact of the key `digest`."""
        if self._profile is None or (heard := self._leases.heard(lease_of(self._profile))) is None:
            return False
        if self._coming is None or self._coming.done():
            is_written, now = not isinstance(heard.answer, Wait), self._clock()
            waits = heard.number != self._number if is_written else now >= self._rests_until
            if not (waits and self._has_much_to_fetch()):
                return self._packs.states(digest)
            self._until = now + _READ_WITHIN + (0.0 if is_written else _HELD_BACK)
            self._coming = asyncio.create_task(self._come(self._profile))
            self._coming.add_done_callback(lambda task: tell_if_failed(task, "packs of this job are not awaited"))
        await asyncio.wait({self._coming}, timeout=max(0.0, self._until - self._clock()))
        return self._packs.states(digest)

    async def _come(self, profile: str) -> None:
        """Wait until the writer's lease ends, and read the pack."""
        begun, lease, holder = self._clock(), lease_of(profile), ""
        lacked: list[str] = []  # when the writer began
        try:
            async with self._leases.watch(lease) as watch:
                while (heard := self._leases.heard(lease)) is not None and isinstance(heard.answer, Wait):
                    if not holder:
                        holder, ready = heard.answer.holder, self._leases.ready_keys(heard.number)
                        lacked = [digest for digest in ready if not self._packs.states(digest)]
                    if heard.answer.holder != holder:  # the next one writes
                        break
                    if self._clock() >= begun + _HELD_BACK:
                        self._rest(_HELD_BACK)
                        return
                    await watch.changed(begun + _HELD_BACK - self._clock())
        except LeaseUnavailable:
            return
        if heard is not None:
            self._number, reads = heard.number, self._clock()
            await self._packs.renew(profile)
            self._read = self._clock() - reads
            if holder:
                found = {digest for digest in lacked if self._packs.states(digest)}
                self._left_out, brought = _passed_over(lacked, found), len(found)
                if not brought or 0 < brought * self._pace < self._clock() - begun:
                    self._rest(self._clock() - begun)

    def _rest(self, seconds: float) -> None:
        self._rests_until = max(self._rests_until, self._clock() + _RESTS * seconds)

    def close(self) -> None:
        """Hold nothing back any more."""
        self._profile = None
        if self._timer is not None:
            self._timer.cancel()
        if self._coming is not None:
            self._coming.cancel()


def _passed_over(keys: list[str], written: Container[str]) -> set[str]:
    """The keys that a pack lacks although its writer came to them: too large, say, or vanished. Those behind the last one that
    it has were not read in time. All of them, if it has none.
    """
    reached = next((n for n in range(len(keys), 0, -1) if keys[n - 1] in written), len(keys))
    return {digest for digest in keys[:reached] if digest not in written}
