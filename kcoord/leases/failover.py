"""A breaker between two lease services: the first one serves, and while it cannot, the second, which may be a breaker itself.

Losing the first service loses efficiency only. What this agent holds is made known to the service that takes over, by renewing it
there at once; a key whose waiter was faster than its holder is compiled once more. A background probe finds out when the first is
back, so that no claim ever waits for a dead server. It takes two answers in a row: after the first one every agent makes known in
the service that is back what it holds, and takes there too what it takes from then on; after the second one it uses it, so that
coming back costs no compile. Not guaranteed: an agent that finds it back later than another one uses it may still give two.

What ended in the meantime the first service may still lease: it was asked before it failed, or has carried out what nobody waited
for any more. Nobody renews that, and everybody would wait for its TTL: so it is given back before the first one is used again.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from typing import Any, TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Answer, LeaseService, Watch, Won, ended
from kcoord.telemetry.events import tell_bug

_T = TypeVar("_T")

_PROBE_EVERY = 2.0  # seconds
_MOST_OWED = 1000  # the oldest have most likely ended by their TTL
_GIVEN_BACK_AT_ONCE = 64


class Failover(LeaseService):
    """`tell` is called with one line whenever the breaker opens or closes."""

    def __init__(self, first: LeaseService, second: LeaseService, tell: Callable[[str], object]) -> None:
        self._first, self._second, self._tell = first, second, tell
        self._probe: asyncio.Task[None] | None = None
        self._handover: asyncio.Task[None] | None = None  # to the second; new leases are taken there after it
        self._held: dict[tuple[str, str], None] = {}  # keys and tokens, in whichever service
        self._owed: dict[tuple[str, str], None] = {}  # that have ended, and the first may still lease
        self._returning = False  # the first has answered, and knows what this agent holds, but does not serve yet
        self._opened = self._closed = 0
        self._ending = False
        self._why = ""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.serving.name

    @property
    def open(self) -> bool:
        """Whether the second service serves now."""
        return self._probe is not None

    @property
    def serving(self) -> LeaseService:
        return self._second if self.open else self._first

    def breakers(self) -> list[dict[str, Any]]:
        state = "open" if self.open else "closed"
        counts = {"opened": self._opened, "closed": self._closed}
        return [{"service": self._first.name, "state": state, **counts, "why": self._why}, *self._second.breakers()]

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        was_open = self.open
        answer = await self._either(lambda s: s.acquire(key, token, holder, void=void))
        if isinstance(answer, Won) and was_open and (self._returning or not self.open):
            answer = await self._unless_the_first_knows(answer, key, token, holder, void)
        if isinstance(answer, Won):
            self._held[key, token] = None
        elif self.open and not was_open:  # the first may have given it, too: its answer never came
            self._owe(key, token)
        return answer

    async def _unless_the_first_knows(self, won: Won, key: str, token: str, holder: str, void: str | None) -> Answer:
        """Agents come back one by one, and who was faster asks the first service already: so both must agree."""
        try:
            answer = await self._first.acquire(key, token, holder, void=void)
        except LeaseUnavailable:
            return won
        if isinstance(answer, Won):
            return won
        with suppress(LeaseUnavailable):
            await self._second.release(key, token)
        return answer

    async def renew(self, key: str, token: str) -> bool:
        if not self.open:
            try:
                return await self._first.renew(key, token)
            except LeaseUnavailable as error:
                self._trip(error)
        await self._second.renew(key, token)  # it was leased there, or is made known there now
        return True  # not known to be lost; the first service says so when it is back

    async def ready(self, key: str, token: str, manifest: str) -> None:
        await self._end(key, token, lambda s: s.ready(key, token, manifest))

    async def fail(self, key: str, token: str, log: str, where: str) -> bool:
        return await self._end(key, token, lambda s: s.fail(key, token, log, where))

    async def release(self, key: str, token: str) -> bool:
        return await self._end(key, token, lambda s: s.release(key, token))

    def watch(self, key: str) -> Watch:
        return _Watch(self, key)

    async def ping(self) -> None:
        await self._either(lambda s: s.ping())

    async def close(self) -> None:
        self._ending = True
        await ended({task for task in (self._probe, self._handover) if task is not None})
        await self._first.close()
        await self._second.close()

    async def _end(self, key: str, token: str, command: Callable[[LeaseService], Awaitable[_T]]) -> _T:
        """End a lease where leases are now, and in the service that does not serve now what it may hold of it."""
        self._held.pop((key, token), None)
        try:
            return await self._either(command)
        finally:
            if self.open:
                self._owe(key, token)
            with suppress(LeaseUnavailable):
                await self._second.release(key, token)
            if self.open and self._returning:
                with suppress(LeaseUnavailable):
                    await command(self._first)
                    self._owed.pop((key, token), None)

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
        self._handover = asyncio.create_task(self._make_known(self._second))
        self._handover.add_done_callback(self._handed_over)
        self._begin_probe(self._handover)
        self._tell(f"{self._first.name} cannot be used ({error}); until it is back, coordination is by {self.name}")

    def _begin_probe(self, handover: asyncio.Task[None]) -> None:
        self._probe = asyncio.create_task(self._until_back(handover))
        self._probe.add_done_callback(functools.partial(self._probed, handover))

    def _probed(self, handover: asyncio.Task[None], probe: asyncio.Task[None]) -> None:
        """Without a probe the first service would never be used again: one that failed is followed by another."""
        if not probe.cancelled() and (error := probe.exception()) is not None:
            self._unforeseen(error)
            self._returning = False
            if not self._ending:
                self._begin_probe(handover)

    def _handed_over(self, handover: asyncio.Task[None]) -> None:
        """Of a service that cannot be used, whoever asks it next is told."""
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
                await self._give_back_owed()
                self._returning = True
                await self._make_known(self._first)
            except LeaseUnavailable:
                self._returning = False
                continue
            if answered:
                break
        self._handover, self._returning = None, False
        self._probe, self._closed = None, self._closed + 1
        self._tell(f"coordination by {self._first.name} is back")

    def _owe(self, key: str, token: str) -> None:
        self._owed[key, token] = None
        if len(self._owed) > _MOST_OWED:
            del self._owed[next(iter(self._owed))]

    async def _give_back_owed(self) -> None:
        """All of it, also what ends meanwhile; what cannot be given back ends by its TTL."""
        while some := list(itertools.islice(self._owed, _GIVEN_BACK_AT_ONCE)):
            for lease in some:
                del self._owed[lease]
            ended_ones = [lease for lease in some if lease not in self._held]
            await asyncio.gather(*(self._first.release(*lease) for lease in ended_ones), return_exceptions=True)

    async def _make_known(self, service: LeaseService) -> None:
        """Take in `service` what this agent holds. What is left in the other one ends with its flight, or by its TTL.

        A token that was released meanwhile takes nothing: that is in the contract of `renew`.
        """
        await asyncio.gather(*(service.renew(key, token) for key, token in list(self._held)))


class _Watch(Watch):
    """The watch of whichever service serves; when that changes, there is a reason to ask again."""

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
