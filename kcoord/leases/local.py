"""Leases of one node: the agent itself is the arbiter, in its own memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from kcoord.latest import Latest
from kcoord.leases.base import Answer, EventWatch, Failed, Lease, LeaseService, Ready, Wait, Watch, monotonic

_REMEMBERED = 10_000


@dataclass
class _Held:
    lease: Lease
    expires: float
    limit: float


@dataclass
class _Outcome:
    answer: Ready | Failed
    until: float


class LocalLeases(LeaseService):
    """The rules of Redis's scripts, without a server. `clock` gives seconds and never goes back."""

    reaches_nodes = False
    name = "this node"

    def __init__(self, ttl: float, limit: float, failure_ttl: float, clock: Callable[[], float] = monotonic) -> None:
        self._ttl, self._limit, self._failure_ttl, self._clock = ttl, limit, failure_ttl, clock
        self._held: dict[str, _Held] = {}
        self._outcomes: Latest[str, _Outcome] = Latest(_REMEMBERED)
        self._watchers: dict[str, set[asyncio.Event]] = {}

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        now, outcome, held = self._clock(), self._outcomes.get(key), self._held.get(key)
        if outcome is not None and now < outcome.until and outcome.answer != Ready(void or ""):
            return outcome.answer
        self._outcomes.pop(key, None)
        if held is None or now >= held.expires:
            held = self._held[key] = _Held(Lease(self, key, token, holder, self._limit), 0.0, now + self._limit)
        elif held.lease.token != token:
            return Wait(held.lease.holder, held.expires - now)
        held.expires = min(now + self._ttl, held.limit)
        return held.lease

    async def renew(self, lease: Lease) -> bool:
        now, held = self._clock(), self._held_by(lease)
        if held is None or now >= held.limit:
            return False
        held.expires = min(now + self._ttl, held.limit)
        return True

    async def ready(self, key: str, manifest: str) -> None:
        self._end(key, Ready(manifest), float("inf"))

    async def fail(self, lease: Lease, log: str, where: str) -> bool:
        if ours := self._held_by(lease) is not None:
            self._end(lease.key, Failed(log, where), self._clock() + self._failure_ttl)
        return ours

    async def release(self, lease: Lease) -> bool:
        if ours := self._held_by(lease) is not None:
            self._end(lease.key, None, 0.0)
        return ours

    def watch(self, key: str) -> Watch:
        return EventWatch(self._watchers, key)

    def _held_by(self, lease: Lease) -> _Held | None:
        held = self._held.get(lease.key)
        return held if held is not None and held.lease.token == lease.token else None

    def _end(self, key: str, answer: Ready | Failed | None, until: float) -> None:
        self._held.pop(key, None)
        if answer is not None:
            self._outcomes[key] = _Outcome(answer, until)
        for event in self._watchers.get(key, ()):
            event.set()
