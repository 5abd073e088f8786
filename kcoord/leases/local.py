"""Leases of one node: the agent itself is the arbiter, in its own memory."""

from __future__ import annotations

import asyncio
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from kcoord.leases.base import Answer, Failed, LeaseService, Ready, Wait, Watch, Won, monotonic, within

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
        try:
            await within(timeout, self.event.wait())
        except asyncio.TimeoutError:
            return False
        self.event.clear()
        return True


class LocalLeases(LeaseService):
    """The same rules as Redis's script, without a server. `clock` gives seconds and never goes back."""

    name = "this node"

    def __init__(self, ttl: float, limit: float, failure_ttl: float, clock: Callable[[], float] = monotonic) -> None:
        self._ttl, self._limit, self._failure_ttl, self._clock = ttl, limit, failure_ttl, clock
        self._leases: dict[str, _Lease] = {}
        self._outcomes: OrderedDict[str, _Outcome] = OrderedDict()  # the oldest are forgotten first
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._fences = itertools.count(1)

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        now = self._clock()
        outcome = self._outcomes.get(key)
        if outcome is not None:
            untrue = isinstance(outcome.answer, Ready) and outcome.answer.manifest == void
            if now < outcome.until and not untrue:
                return outcome.answer
            del self._outcomes[key]
        lease = self._leases.get(key)
        if lease is not None and lease.token != token and now < lease.expires:
            return Wait(lease.holder, lease.expires - now)
        if lease is None or lease.token != token or now >= lease.expires:
            lease = self._leases[key] = _Lease(token, holder, next(self._fences), 0.0, now + self._limit)
        lease.expires = min(now + self._ttl, lease.limit)
        return Won(lease.fence)

    async def renew(self, key: str, token: str) -> bool:
        now = self._clock()
        lease = self._leases.get(key)
        if lease is None or lease.token != token or now >= lease.limit:
            return False
        lease.expires = min(now + self._ttl, lease.limit)
        return True

    async def ready(self, key: str, token: str, manifest: str) -> None:
        self._end(key, Ready(manifest), float("inf"))

    async def fail(self, key: str, token: str, log: str, where: str) -> bool:
        if not self._holds(key, token):
            return False
        self._end(key, Failed(log, where), self._clock() + self._failure_ttl)
        return True

    async def release(self, key: str, token: str) -> bool:
        if not self._holds(key, token):
            return False
        self._end(key, None, 0.0)
        return True

    def watch(self, key: str) -> Watch:
        return _Watch(self._watchers, key)

    def _holds(self, key: str, token: str) -> bool:
        lease = self._leases.get(key)
        return lease is not None and lease.token == token

    def _end(self, key: str, answer: Ready | Failed | None, until: float) -> None:
        self._leases.pop(key, None)
        if answer is not None:
            self._outcomes[key] = _Outcome(answer, until)
            self._outcomes.move_to_end(key)
            if len(self._outcomes) > _REMEMBERED:
                self._outcomes.popitem(last=False)
        for event in self._watchers.get(key, ()):
            event.set()
