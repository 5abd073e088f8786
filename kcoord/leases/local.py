"""Leases of one node: the agent itself is the arbiter, in its own memory."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from kcoord.latest import Latest
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Wait, Watch, Won, happened, monotonic

_REMEMBERED = 10_000


@dataclass
class _Lease:
    token: str
    holder: str
    fence: int
    expires: float
    limit: float


@dataclass
class _Outcome:
    answer: Ready | Failed
    until: float


@dataclass
class _Watch(Watch):
    watchers: dict[str, set[asyncio.Event]]
    key: str
    event: asyncio.Event = field(default_factory=asyncio.Event)

    async def __aenter__(self) -> _Watch:
        self.watchers.setdefault(self.key, set()).add(self.event)
        return self

    async def __aexit__(self, *exc: object) -> None:
        events = self.watchers[self.key]
        events.discard(self.event)
        if not events:
            del self.watchers[self.key]

    async def changed(self, timeout: float) -> bool:
        return await happened(self.event, timeout)


class LocalLeases(LeaseService):
    """The rules of Redis's script, without a server. `clock` gives seconds and never goes back."""

    reaches_nodes = False
    name = "this node"

    def __init__(self, ttl: float, limit: float, failure_ttl: float, clock: Callable[[], float] = monotonic) -> None:
        super().__init__(limit)
        self._ttl, self._failure_ttl, self._clock = ttl, failure_ttl, clock
        self._leases: dict[str, _Lease] = {}
        self._outcomes: Latest[str, _Outcome] = Latest(_REMEMBERED)
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._fences = itertools.count(1)

    async def take(self, lease: Lease, void: str | None) -> Won | Ready | Failed | Wait:
        now, answer = self._clock(), self._look(lease.key, void)
        known = self._leases.get(lease.key)
        ours = known is not None and known.token == lease.token
        if isinstance(answer, (Ready, Failed)) or (answer is not None and not ours):
            return answer
        self._outcomes.pop(lease.key, None)
        if known is None or not ours or now >= known.expires:
            known = _Lease(lease.token, lease.holder, next(self._fences), 0.0, now + self.limit)
            self._leases[lease.key] = known
        known.expires = min(now + self._ttl, known.limit)
        return Won(known.fence)

    async def look(self, key: str) -> Ready | Failed | Wait | None:
        return self._look(key, None)

    def _look(self, key: str, void: str | None) -> Ready | Failed | Wait | None:
        now, outcome, lease = self._clock(), self._outcomes.get(key), self._leases.get(key)
        if outcome is not None and now < outcome.until and outcome.answer != Ready(void or ""):
            return outcome.answer
        return Wait(lease.holder, lease.expires - now) if lease is not None and now < lease.expires else None

    async def renew(self, lease: Lease) -> bool:
        now, known = self._clock(), self._leases.get(lease.key)
        if known is None or known.token != lease.token or now >= known.limit:
            return False
        known.expires = min(now + self._ttl, known.limit)
        return True

    async def ready(self, key: str, manifest: str, lease: Lease | None = None) -> None:
        self._end(key, Ready(manifest), float("inf"))

    async def fail(self, lease: Lease, log: str, where: str) -> bool:
        if held := self._holds(lease):
            self._end(lease.key, Failed(log, where), self._clock() + self._failure_ttl)
        return held

    async def release(self, lease: Lease) -> bool:
        if held := self._holds(lease):
            self._end(lease.key, None, 0.0)
        return held

    def watch(self, key: str) -> Watch:
        return _Watch(self._watchers, key)

    def _holds(self, lease: Lease) -> bool:
        known = self._leases.get(lease.key)
        return known is not None and known.token == lease.token

    def _end(self, key: str, answer: Ready | Failed | None, until: float) -> None:
        self._leases.pop(key, None)
        if answer is not None:
            self._outcomes[key] = _Outcome(answer, until)
        for event in self._watchers.get(key, ()):
            event.set()
