"""A breaker between two lease services: the first serves, and while it cannot, the second, which may be a breaker itself.

Losing the first service loses efficiency only. This agent's leases are handed over by renewing them at once in the second; a key
whose waiter was faster than its holder is compiled once more. A background probe finds out when the first is back, so no claim
ever waits for a dead server. It takes two answers in a row: after the first, every agent renews its leases in the service that
is back, and takes new ones there too; after the second answer it uses it, so coming back costs no compile. Not guaranteed: an
agent that finds it back later than another one uses it may still give a lease twice.

During an outage the first service may keep leases that have ended: it gave them before it failed, or carried out a command whose
caller had given up. Nobody renews these, and waiters would wait for their TTL: they are released before it is used again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.latest import Latest
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Wait, Watch, Won, ended, monotonic
from kcoord.telemetry.events import tell_bug

_T = TypeVar("_T")

_PROBE_EVERY = 2.0  # seconds
_AGREED_AFTER = 10.0  # seconds; nodes learn within 7 of each other that a service is gone, or back
_MOST_OWED = 1000  # leases; the oldest have most likely ended by their TTL
_RELEASED_AT_ONCE = 64


class Failover(LeaseService):
    """`tell` is called with one line whenever the breaker opens or closes."""

    def __init__(self, first: LeaseService, second: LeaseService, tell: Callable[[str], object]) -> None:
        super().__init__(first.limit)
        self._first, self._second, self._tell = first, second, tell
        self._probe: asyncio.Task[None] | None = None
        self._handover: asyncio.Task[None] | None = None  # to the second; new leases are taken there after it
        # given up or never won, and the first may still keep them
        self._owed: Latest[tuple[str, str], Lease] = Latest(_MOST_OWED)
        self._returning = False  # the first has answered, and has this agent's leases, but does not serve yet
        self._opened = self._closed = 0
        self._agreed_at = -math.inf
        self._ending = False
        self._why = ""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.serving.name

    @property
    def open(self) -> bool:
        """True while the second service serves."""
        return self._probe is not None

    @property
    def serving(self) -> LeaseService:
        return self._second if self.open else self._first

    @property
    def agreed(self) -> bool:
        return self.serving.reaches_nodes and monotonic() >= self._agreed_at and self.serving.agreed

    def breakers(self) -> list[dict[str, Any]]:
        state = "open" if self.open else "closed"
        counts = {"opened": self._opened, "closed": self._closed}
        return [{"service": self._first.name, "state": state, **counts, "why": self._why}, *self._second.breakers()]

    async def take(self, lease: Lease, void: str | None) -> Won | Ready | Failed | Wait:
        was_open = self.open
        answer = await self._either(lambda s: s.take(lease, void))
        if isinstance(answer, Won) and was_open and (self._returning or not self.open):
            answer = await self._unless_the_first_refuses(answer, lease, void)
        if (
            not isinstance(answer, Won) and self.open and not was_open
        ):  # the first may have given it: its answer never came
            self._owe(lease)
        return answer

    async def _unless_the_first_refuses(self, won: Won, lease: Lease, void: str | None) -> Won | Ready | Failed | Wait:
        """Agents come back one by one, and the faster ones use the first service already: so both must agree."""
        try:
            answer = await self._first.take(lease, void)
        except LeaseUnavailable:
            return won
        if isinstance(answer, Won):
            return won
        with suppress(LeaseUnavailable):
            await self._second.release(lease)
        return answer

    async def look(self, key: str) -> Ready | Failed | Wait | None:
        return await self._either(lambda s: s.look(key))

    async def renew(self, lease: Lease) -> bool:
        if not self.open:
            try:
                return await self._first.renew(lease)
            except LeaseUnavailable as error:
                self._trip(error)
        await self._second.renew(lease)  # it was leased there, or is handed over now
        return lease.left() > 0  # not known to be lost; the first service says so when it is back

    async def ready(self, key: str, manifest: str, lease: Lease | None = None) -> None:
        await self._end(lease, lambda s: s.ready(key, manifest, lease))

    async def fail(self, lease: Lease, log: str, where: str) -> bool:
        return await self._end(lease, lambda s: s.fail(lease, log, where))

    async def release(self, lease: Lease) -> bool:
        return await self._end(lease, lambda s: s.release(lease))

    def watch(self, key: str) -> Watch:
        return _Watch(self, key)

    async def ping(self) -> None:
        await self._either(lambda s: s.ping())

    async def close(self) -> None:
        self._ending = True
        await ended({task for task in (self._probe, self._handover) if task is not None})
        await self._first.close()
        await self._second.close()

    async def _end(self, lease: Lease | None, command: Callable[[LeaseService], Awaitable[_T]]) -> _T:
        """End a lease in the service that serves, and whatever the other one may keep of it."""
        try:
            return await self._either(command)
        finally:
            if lease is not None:
                if self.open:
                    self._owe(lease)
                with suppress(LeaseUnavailable):
                    await self._second.release(lease)
            if self.open and self._returning:
                with suppress(LeaseUnavailable):
                    await command(self._first)
                    if lease is not None:
                        self._owed.pop((lease.key, lease.token), None)

    async def _either(self, command: Callable[[LeaseService], Awaitable[_T]]) -> _T:
        if not self.open:
            try:
                return await command(self._first)
            except LeaseUnavailable as error:
                self._trip(error)
        if self._handover is not None:
            await asyncio.wait({self._handover})
        return await command(self._second)

    def _trip(self, error: LeaseUnavailable) -> None:
        if self.open:
            return
        self._opened, self._why = self._opened + 1, str(error)
        self._agreed_at = monotonic() + _AGREED_AFTER
        self._handover = asyncio.create_task(self._hand_over(self._second))
        self._handover.add_done_callback(self._handed_over)
        self._begin_probe(self._handover)
        self._tell(f"{self._first.name} cannot be used ({error}); until it is back, coordination is by {self.name}")

    def _begin_probe(self, handover: asyncio.Task[None]) -> None:
        self._probe = asyncio.create_task(self._until_back(handover))
        self._probe.add_done_callback(functools.partial(self._probed, handover))

    def _probed(self, handover: asyncio.Task[None], probe: asyncio.Task[None]) -> None:
        """A probe that failed is followed by another: without one, the first service would never be used again."""
        if not probe.cancelled() and (error := probe.exception()) is not None:
            self._unforeseen(error)
            self._returning = False
            if not self._ending:
                self._begin_probe(handover)

    def _handed_over(self, handover: asyncio.Task[None]) -> None:
        """`LeaseUnavailable` is no error here: the next command meets it, too."""
        error = None if handover.cancelled() else handover.exception()
        if error is not None and not isinstance(error, LeaseUnavailable):
            self._unforeseen(error)

    def _unforeseen(self, error: BaseException) -> None:
        tell_bug(error, "a breaker failed", self._tell)

    async def _until_back(self, handover: asyncio.Task[None]) -> None:
        await asyncio.wait({handover})
        while True:
            await asyncio.sleep(_PROBE_EVERY * random.uniform(0.9, 1.1))
            answered = self._returning
            try:
                await self._first.ping()
                await self._release_owed()
                self._returning = True
                await self._hand_over(self._first)
            except LeaseUnavailable:
                self._returning = False
                continue
            if answered:
                break
        self._handover, self._returning = None, False
        self._probe, self._closed = None, self._closed + 1
        self._agreed_at = monotonic() + _AGREED_AFTER
        self._tell(f"coordination by {self._first.name} is back")

    def _owe(self, lease: Lease) -> None:
        self._owed[lease.key, lease.token] = lease

    async def _release_owed(self) -> None:
        """Release all of them in the first service, with those that are added meanwhile. One that fails ends by its TTL."""
        while some := dict(itertools.islice(self._owed.items(), _RELEASED_AT_ONCE)):
            for name in some:
                del self._owed[name]
            ended_ones = [lease for name, lease in some.items() if name not in self.held]
            await asyncio.gather(*(self._first.release(lease) for lease in ended_ones), return_exceptions=True)

    async def _hand_over(self, service: LeaseService) -> None:
        """Take this agent's leases in `service`. The other one keeps them until their flights end, or for their TTL."""
        await asyncio.gather(*(service.renew(lease) for lease in list(self.held.values())))


class _Watch(Watch):
    """Watches the service that serves. A change of service counts as a change of the key: ask again."""

    def __init__(self, failover: Failover, key: str) -> None:
        self._failover, self._key = failover, key
        self._entered = AsyncExitStack()  # of the watch
        self._watch: Watch | None = None
        self._service: LeaseService | None = None

    async def __aenter__(self) -> _Watch:
        await self._follow()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._entered.aclose()

    async def changed(self, timeout: float) -> bool:
        if self._watch is not None and self._service is self._failover.serving:
            return await self._watch.changed(timeout)
        await self._follow()
        if self._watch is None:
            await asyncio.sleep(min(timeout, 0.05))
        return True

    async def _follow(self) -> None:
        service = self._failover.serving
        self._watch, self._service = None, service
        await self._entered.aclose()
        try:
            self._watch = await self._entered.enter_async_context(service.watch(self._key))
        except LeaseUnavailable as error:
            if service is not self._failover._first:
                raise
            self._failover._trip(error)
