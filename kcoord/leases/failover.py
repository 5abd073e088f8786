"""A breaker between two lease services: the first one serves, and while it cannot, the second.

Losing the first service loses efficiency only: what was leased there may be compiled once more. A background probe finds
out when it is back, so that no claim ever waits for a dead server.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Answer, LeaseService, Watch

_T = TypeVar("_T")

_PROBE_EVERY = 2.0  # seconds


class Failover(LeaseService):
    """`tell` is called with one line whenever the breaker opens or closes."""

    def __init__(self, first: LeaseService, second: LeaseService, tell: Callable[[str], object]) -> None:
        self._first, self._second, self._tell = first, second, tell
        self._probe: asyncio.Task[None] | None = None
        self._why = ""

    @property
    def name(self) -> str:  # type: ignore[override]
        return self._second.name if self.open else self._first.name

    @property
    def open(self) -> bool:
        """Whether the second service serves now."""
        return self._probe is not None

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        return await self._either(lambda s: s.acquire(key, token, holder, void=void))

    async def renew(self, key: str, token: str) -> bool:
        if self.open:
            await self._second.renew(key, token)  # it may have been leased there
            return True  # not known to be lost; the first service says so when it is back
        try:
            return await self._first.renew(key, token)
        except LeaseUnavailable as error:
            self._trip(error)
            return True

    async def ready(self, key: str, token: str, manifest: str) -> None:
        await self._either(lambda s: s.ready(key, token, manifest))

    async def fail(self, key: str, token: str, log: str, where: str) -> bool:
        return await self._either(lambda s: s.fail(key, token, log, where))

    async def release(self, key: str, token: str) -> bool:
        try:
            return await self._either(lambda s: s.release(key, token))
        finally:
            await self._second.release(key, token)

    def watch(self, key: str) -> Watch:
        return self._second.watch(key) if self.open else _FirstWatch(self, self._first.watch(key))

    async def close(self) -> None:
        if self._probe is not None:
            self._probe.cancel()
            await asyncio.gather(self._probe, return_exceptions=True)
        await self._first.close()
        await self._second.close()

    async def _either(self, command: Callable[[LeaseService], Awaitable[_T]]) -> _T:
        if not self.open:
            try:
                return await command(self._first)
            except LeaseUnavailable as error:
                self._trip(error)
        return await command(self._second)

    def _trip(self, error: LeaseUnavailable) -> None:
        if self.open:
            return
        self._tell(f"{self._first.name} cannot be used ({error}); {self._second.name} coordinates until it is back")
        self._probe = asyncio.create_task(self._until_back())

    async def _until_back(self) -> None:
        while True:
            await asyncio.sleep(_PROBE_EVERY * random.uniform(0.9, 1.1))
            try:
                await self._first.ping()
            except LeaseUnavailable:
                continue
            self._probe = None
            self._tell(f"{self._first.name} is back and coordinates again")
            return


class _FirstWatch(Watch):
    """The first service's watch; without one, every call of `changed` is a reason to ask again, after its time-out."""

    def __init__(self, failover: Failover, watch: Watch) -> None:
        self._failover, self._watch, self._entered = failover, watch, False

    async def __aenter__(self) -> _FirstWatch:
        try:
            await self._watch.__aenter__()
            self._entered = True
        except LeaseUnavailable as error:
            self._failover._trip(error)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._entered:
            await self._watch.__aexit__(*exc)

    async def changed(self, timeout: float) -> bool:
        if self._entered:
            return await self._watch.changed(timeout)
        await asyncio.sleep(min(timeout, 0.05))
        return True
