"""A breaker between two lease services: the first serves, and while it cannot, the second.

The loss of the first service costs compiles and nothing else: a lease lives and ends in the service that gave it, flights that
wait for other nodes ask again, and a lease that ended during the outage costs its waiters one TTL. Nodes go and come back one by
one, so a key may be leased by both services in these seconds.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Answer, Lease, LeaseService, Watch, monotonic, probe
from kcoord.telemetry.events import tell_bug

T = TypeVar("T")


class Breaker(LeaseService):
    """Opens when a command of `first` raises `LeaseUnavailable`; closes when `probe` works again. ``tell(line)`` hears of both.

    `alone` serves instead of `second` if more than `most_nodes` nodes shared `first`: a file system bears no more. In seconds:
    `every` between two probes, `back_within` for the random moment of closing, `settles` until other nodes have moved, too.
    """

    def __init__(
        self,
        first: LeaseService,
        second: LeaseService,
        tell: Callable[[str], object],
        *,
        alone: LeaseService | None = None,
        most_nodes: int = 64,
        every: float = 2.0,
        back_within: float = 5.0,
        settles: float = 10.0,
    ) -> None:
        self._first, self._second, self._alone, self._most_nodes = first, second, alone or second, most_nodes
        self._tell, self._every, self._back_within, self._settles = tell, every, back_within, settles
        self.serving, self._probe = first, None  # type: LeaseService, asyncio.Task[None] | None
        self._opened, self._closed, self._moved, self._why = 0, 0, -settles, ""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.serving.name

    @property
    def reaches_nodes(self) -> bool:  # type: ignore[override]
        return self.serving.reaches_nodes

    @property
    def open(self) -> bool:
        """True while another service than the first serves."""
        return self.serving is not self._first

    @property
    def settled(self) -> bool:
        return monotonic() >= self._moved + self._settles and self.serving.settled

    def breakers(self) -> list[dict[str, Any]]:
        state, counts = "open" if self.open else "closed", {"opened": self._opened, "closed": self._closed}
        return [{"service": self._first.name, "state": state, **counts, "why": self._why}, *self._second.breakers()]

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        answer = await self.use(lambda service: service.acquire(key, token, holder, void=void))
        if isinstance(answer, Lease):
            answer.service = self
        return answer

    async def renew(self, lease: Lease) -> bool:
        if self.open and lease.grantor is self._first:
            return True  # not known to be lost: the first service says so when it is back
        return await self._grantor(lease).renew(lease)

    async def ready(self, key: str, manifest: str) -> None:
        await self.use(lambda service: service.ready(key, manifest))

    async def fail(self, lease: Lease, log: str, where: str) -> bool:
        return not self._is_away(lease) and await self._grantor(lease).fail(lease, log, where)

    async def release(self, lease: Lease) -> bool:
        return not self._is_away(lease) and await self._grantor(lease).release(lease)

    def watch(self, key: str) -> Watch:
        return _Watch(self, key)

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        for service in dict.fromkeys((self._first, self._second, self._alone)):
            await service.close()

    async def use(self, command: Callable[[LeaseService], Awaitable[T]]) -> T:
        """The result of `command` of the service that serves."""
        if not self.open:
            try:
                return await command(self._first)
            except LeaseUnavailable as error:
                self._open(error)
        return await command(self.serving)

    def lost(self, service: LeaseService, error: LeaseUnavailable) -> bool:
        """A watch of `service` ended in `error`. False: nobody serves in its place."""
        if service is self._first:
            self._open(error)
        return service is self._first

    def _is_away(self, lease: Lease) -> bool:
        return self.open and lease.grantor is self._first

    def _grantor(self, lease: Lease) -> LeaseService:
        if lease.grantor in (self._first, self._alone):
            return lease.grantor
        return self._second

    def _open(self, error: LeaseUnavailable) -> None:
        if self.open:
            return
        self.serving = self._second if self._first.nodes <= self._most_nodes else self._alone
        self._opened, self._moved, self._why = self._opened + 1, monotonic(), str(error)
        if not error.told:
            self._tell(f"{self._first.name} cannot be used ({error}); until it is back, coordination is by {self.name}")
        self._begin_probe()

    def _begin_probe(self) -> None:
        self._probe = asyncio.create_task(self._until_back())
        self._probe.add_done_callback(self._back)

    async def _until_back(self) -> None:
        while True:
            await asyncio.sleep(self._every * random.uniform(0.9, 1.1))
            try:
                await probe(self._first)
            except LeaseUnavailable:
                continue
            await asyncio.sleep(random.uniform(0.0, self._back_within))  # thousands of agents come back
            return

    def _back(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:  # without a probe, the first service would never be used again
            tell_bug(error, "a breaker failed", self._tell)
            self._begin_probe()
            return
        self.serving, self._closed, self._moved = self._first, self._closed + 1, monotonic()
        self._tell(f"coordination by {self._first.name} is back")


class _Watch(Watch):
    """Watches the service that serves. A change of service counts as a change of the key: ask again."""

    def __init__(self, breaker: Breaker, key: str) -> None:
        self._breaker, self._key = breaker, key
        self._entered = AsyncExitStack()  # of the watch
        self._watch, self._service = None, None  # type: Watch | None, LeaseService | None

    async def __aenter__(self) -> _Watch:
        await self._follow()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._entered.aclose()

    async def changed(self, timeout: float) -> bool:
        if self._watch is not None and self._service is self._breaker.serving:
            try:
                return await self._watch.changed(timeout)
            except LeaseUnavailable as error:
                if not self._breaker.lost(self._service, error):
                    raise
        await self._follow()
        return True

    async def _follow(self) -> None:
        async def enter(service: LeaseService) -> None:
            self._watch = await self._entered.enter_async_context(service.watch(self._key))
            self._service = service

        self._watch = None
        await self._entered.aclose()
        await self._breaker.use(enter)
