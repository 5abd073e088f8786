"""Leases: the time-bounded right to compile a key, and how waiters hear that it ended.

A lease saves work and guarantees nothing else. At most one unexpired lease per key exists in a healthy service; after a
partition, a failover or a flush there may be two leaders, and both may publish: artifacts are addressed by their key and
published under a name that one writer wins, so the second costs time and harms nothing.

`LeaseService` has seven members. The algorithm is `await_turn`: *subscribe, then check*, for the other order loses wake-ups.
"""

from __future__ import annotations

import abc
import asyncio
import platform
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.telemetry.events import tell_if_failed

T = TypeVar("T")

RECHECK = 2.0  # seconds; waiters ask this often, so a lost wake-up delays them by no more


@dataclass(frozen=True)
class Unleased:
    """The service cannot lease this key: its claimant may compile all the same, beside others."""


@dataclass(frozen=True)
class Ready:
    """The key is in the store; `manifest` is the SHA-256 of its manifest."""

    manifest: str


@dataclass(frozen=True)
class Failed:
    """The key failed to compile a moment ago. `log` is the leader's, `where` its host and rank."""

    log: str
    where: str = ""


@dataclass(frozen=True)
class Wait:
    """`holder` is compiling; its lease ends in `ttl` seconds if it is not renewed."""

    holder: str
    ttl: float


class Lease:
    """A lease that `LeaseService.acquire` won. It ends by `ready`, `fail` or `release`, by its TTL, or after `limit` seconds.

    `token` names one claim of one agent, `holder` its host, for people. `grantor` is the service that gave it; commands go to
    `service`, which may be a breaker around that. Commands raise `LeaseUnavailable`.
    """

    def __init__(self, service: LeaseService, key: str, token: str, holder: str, limit: float) -> None:
        self.key, self.token, self.holder = key, token, holder
        self.service = self.grantor = service
        self._ends, self._given_up = monotonic() + limit, False
        self._renewals: asyncio.Task[None] | None = None

    def left(self) -> float:
        """Seconds until the hard limit, by this process's clock; 0 once the lease is given up: no service takes it again."""
        return 0.0 if self._given_up else max(0.0, self._ends - monotonic())

    async def renew(self) -> bool:
        """Hold on for another TTL. False: another token has it, the hard limit has passed, or it was given up.

        A service that several nodes share takes a free lease again: it may have been emptied.
        """
        return self.left() > 0 and await self.service.renew(self)

    def keep_alive(self, ttl: float) -> None:
        """Renew every third of `ttl` seconds until the lease is given up or lost; a loss stops nothing else."""
        if self._renewals is None:
            self._renewals = asyncio.create_task(self._keep(ttl / 3))
            self._renewals.add_done_callback(_renewals_ended)

    async def ready(self, manifest: str) -> None:
        """Announce that the key is in the store, and give the lease up. A fact: it is accepted from a lease that was lost."""
        await self._give_up()
        await self.service.ready(self.key, manifest)

    async def fail(self, log: str, where: str) -> bool:
        """End the lease with a failed compile, which is remembered for a while. False: it was not ours any more."""
        return await self._give_up() and await self.service.fail(self, log, where)

    async def release(self) -> bool:
        """Give the lease back, uncompiled; a waiter may take it at once. False: it was not ours any more."""
        return await self._give_up() and await self.service.release(self)

    async def _give_up(self) -> bool:
        """False: it was given up before. No renewal follows once this returns."""
        first, self._given_up = not self._given_up, True
        if self._renewals is not None:
            self._renewals.cancel()
            await asyncio.gather(self._renewals, return_exceptions=True)
        return first

    async def _keep(self, every: float) -> None:
        held = True
        while held:
            await asyncio.sleep(every)
            with suppress(LeaseUnavailable):  # the service may be back before the TTL has run out
                held = await self.renew()


def _renewals_ended(task: asyncio.Task[None]) -> None:
    tell_if_failed(task, "a lease is not renewed any more")


Answer = Lease | Unleased | Ready | Failed | Wait


class LeaseService(abc.ABC):
    """One service, used by one agent. Its commands are idempotent by token, so a lost reply is harmless.

    Every command raises `LeaseUnavailable` if the service cannot be used, within a bound of its own.
    """

    name: str
    reaches_nodes = True
    """False: it serves the ranks of one node."""
    nodes = 0
    """Agents that share the service, about; 0: unknown."""

    @abc.abstractmethod
    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        """Take the lease if it is free, or say why not. The same token gets it again.

        `void` is the manifest of a READY that turned out to be untrue (the artifact is gone, or broken): that READY, and
        no other, is forgotten first. If this is cancelled, a lease that was given all the same is given back.
        """

    @abc.abstractmethod
    async def renew(self, lease: Lease) -> bool:
        """`Lease.renew`, of a lease that has time left."""

    @abc.abstractmethod
    async def ready(self, key: str, manifest: str) -> None:
        """Announce that the key is in the store, which ends its lease. That is a fact and no right: anybody may say it."""

    @abc.abstractmethod
    async def fail(self, lease: Lease, log: str, where: str) -> bool:
        """`Lease.fail`."""

    @abc.abstractmethod
    async def release(self, lease: Lease) -> bool:
        """`Lease.release`; also of a lease that nobody knows to be held."""

    @abc.abstractmethod
    def watch(self, key: str) -> Watch:
        """A subscription to changes of `key`, active once it is entered."""

    async def close(self) -> None:  # noqa: B027 - a service in memory holds nothing
        """Let go of connections. Leases that are still held run out by themselves."""

    @property
    def settled(self) -> bool:
        """False for some seconds after a change of services: nodes may be between the two."""
        return True

    def breakers(self) -> list[dict[str, Any]]:
        """For people: the breakers of a chain of services, the first one's first; empty if there is one service only.

        Each has `service`, `state` (``"open"``: it is not used now), `opened` and `closed` (how often), and the latest `why`.
        """
        return []


class Watch(abc.ABC):
    """An entered watch misses no change of its key that happens after entering."""

    @abc.abstractmethod
    async def changed(self, timeout: float) -> bool:
        """Wait for a change, at most `timeout` seconds. True: the key may have changed since the last call."""

    @abc.abstractmethod
    async def __aenter__(self) -> Watch: ...

    @abc.abstractmethod
    async def __aexit__(self, *exc: object) -> None: ...


class EventWatch(Watch):
    """A watch by an event in `watchers`, which the service sets for each change. ``follow()`` returns once it hears of all."""

    def __init__(
        self, watchers: dict[str, set[asyncio.Event]], key: str, follow: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        self._watchers, self._key, self._follow, self._event = watchers, key, follow, asyncio.Event()

    async def __aenter__(self) -> EventWatch:
        self._watchers.setdefault(self._key, set()).add(self._event)
        if self._follow is not None:
            try:
                await self._follow()
            except BaseException:
                await self.__aexit__()
                raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        events = self._watchers[self._key]
        events.discard(self._event)
        if not events:
            del self._watchers[self._key]

    async def changed(self, timeout: float) -> bool:
        if self._follow is not None:
            await self._follow()  # it may have broken off
        return await happened(self._event, timeout)


async def await_turn(
    service: LeaseService,
    key: str,
    token: str,
    holder: str,
    *,
    void: str | None = None,
    stays: Callable[[Wait], bool] = lambda wait: True,
) -> Lease | Unleased | Ready | Failed | None:
    """Acquire, or wait until there is another answer than `Wait`. Raises `LeaseUnavailable`.

    ``stays(wait)`` hears of each `Wait`; if it says no, the wait ends, and None is returned. Cancel to stop waiting.
    """
    async with service.watch(key) as watch:
        while True:
            answer = await service.acquire(key, token, holder, void=void)
            if not isinstance(answer, Wait):
                return answer
            if not stays(answer):
                return None
            bound = min(RECHECK * random.uniform(0.9, 1.1), max(answer.ttl, 0.01))
            await watch.changed(bound)


@asynccontextmanager
async def leased(service: LeaseService, key: str, token: str, ttl: float) -> AsyncIterator[bool]:
    """A block in which this agent alone of all nodes has the lease of `key`, which is renewed until the end of the block.

    False: another has it, or the service does not reach other nodes now. Raises `LeaseUnavailable`.
    """
    lease = await service.acquire(key, token, platform.node())
    if not isinstance(lease, Lease):
        yield False
        return
    lease.keep_alive(ttl)
    try:
        yield service.reaches_nodes
    finally:
        await lease.release()


async def probe(service: LeaseService) -> None:
    """Subscribe, and acquire, announce and end on a scratch key: return if all of it works. Raises `LeaseUnavailable`.

    A PING would say nothing: a replica, a full server, or one whose user may not write or subscribe, answers it.
    """
    key, manifest = f"probe-{uuid.uuid4().hex}", "none"
    async with service.watch(key):
        for void in (None, manifest):
            lease = await service.acquire(key, key, platform.node(), void=void)
            if not isinstance(lease, Lease):
                raise LeaseUnavailable(f"{service.name} cannot lease a new key: {lease}")
            await (lease.release() if void else lease.ready(manifest))


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled after `seconds`. Raises `TimeoutError`.

    Unlike `asyncio.wait_for` before Python 3.12 it never swallows a cancellation that arrives as the work ends: a claim that
    is cancelled must not go on waiting.
    """
    async with asyncio.timeout(seconds):
        return await work


async def happened(event: asyncio.Event, timeout: float) -> bool:
    """Wait for `event`, at most `timeout` seconds, and clear it. False: it was not set."""
    try:
        await within(timeout, event.wait())
    except TimeoutError:
        return False
    event.clear()
    return True


def monotonic() -> float:
    """The clock of leases that live in this process, in seconds."""
    return time.monotonic()
