"""Leases: the time-bounded, fenced right to compile a key, and how waiters hear that it ended.

A lease saves work and guarantees nothing else. At most one unexpired lease per key exists in a healthy service; after a
partition, a failover or a flush there may be two leaders, and both may publish: artifacts are addressed by their key and
published by a rename that one writer wins, so the second costs time and harms nothing.

`LeaseService.acquire` returns a `Lease`, or the answer that says why not. A service brings the commands and a way to be woken.
The algorithm (`await_turn`: subscribe, *then* check, else a wake-up is lost), renewals and the record of held leases are here.
"""

from __future__ import annotations

import abc
import asyncio
import platform
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.telemetry.events import tell_if_failed

T = TypeVar("T")

RECHECK = 2.0  # seconds; a lost wake-up costs at most this much; with Redis and many agents, one TTL


@dataclass(frozen=True)
class Won:
    """The key may be compiled. `fence` grows with every lease of the key that one service gives; 0: nothing is leased."""

    fence: int


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
    """A lease that `LeaseService.acquire` won. It ends by `ready`, `fail` or `release`, by its TTL, or at its hard limit.

    `token` names one claim of one agent, `holder` its host, for people. A `fence` of 0: the service cannot lease this key;
    its holder may compile all the same, beside others. Commands raise `LeaseUnavailable`.
    """

    def __init__(self, service: LeaseService, key: str, token: str, holder: str) -> None:
        self.key, self.token, self.holder, self.fence = key, token, holder, 0
        self._service, self._ends, self._given_up = service, monotonic() + service.limit, False
        self._renewals: asyncio.Task[None] | None = None

    def left(self) -> float:
        """Seconds until the hard limit, by this process's clock; 0 once the lease is given up: no service takes it again."""
        return 0.0 if self._given_up else max(0.0, self._ends - monotonic())

    async def renew(self) -> bool:
        """Hold on for another TTL. False: another token has it, the hard limit has passed, or it was given up.

        A service that several nodes share takes a free lease again: it may have been emptied.
        """
        return not self._given_up and await self._service.renew(self)

    def keep_alive(self, ttl: float) -> None:
        """Renew every third of `ttl` seconds until the lease is given up or lost; a loss stops nothing else."""
        if self._renewals is None:
            self._renewals = asyncio.create_task(self._keep(ttl / 3))
            self._renewals.add_done_callback(_renewals_ended)

    async def ready(self, manifest: str) -> None:
        """Announce that the key is in the store, and give the lease up. A fact: it is accepted from a lease that was lost."""
        await self._give_up()
        await self._service.ready(self.key, manifest, self)

    async def fail(self, log: str, where: str) -> bool:
        """End the lease with a failed compile, which is remembered for a while. False: it was not ours any more."""
        return await self._give_up() and await self._service.fail(self, log, where)

    async def release(self) -> bool:
        """Give the lease back, uncompiled; a waiter may take it at once. False: it was not ours any more."""
        return await self._give_up() and await self._service.release(self)

    async def _give_up(self) -> bool:
        """False: it was given up before. No renewal follows once this returns."""
        first, self._given_up = not self._given_up, True
        if self._service.held.get((self.key, self.token)) is self:
            del self._service.held[self.key, self.token]
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


Answer = Lease | Ready | Failed | Wait


class LeaseService(abc.ABC):
    """One service, used by one agent; `limit` is the longest that a lease may last, in seconds. Commands are idempotent by token.

    Every command raises `LeaseUnavailable` if the service cannot be reached within a bound of its own. Callers use `acquire`,
    `look`, `ready`, `watch`, and the commands of the `Lease`; the others are what a service implements for these.
    """

    name: str
    reaches_nodes = True
    """False: it serves the ranks of one node."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.held: dict[tuple[str, str], Lease] = {}  # by key and token: won, and not given up

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        """Take the lease if it is free, or say why not. The same token gets the same lease again.

        `void` is the manifest of a READY that turned out to be untrue (the artifact is gone, or broken): that READY, and
        no other, is forgotten first. If this is cancelled, a lease that was given all the same is given back. An answer other
        than a lease may be from a moment ago; those of `look` are not.
        """
        lease, before = Lease(self, key, token, holder), self.held.get((key, token))
        try:
            answer = await self.take(lease, void)
        except asyncio.CancelledError:
            if before is None:
                with suppress(LeaseUnavailable):
                    await self.release(lease)
            raise
        if not isinstance(answer, Won):
            return answer
        if before is not None and before.fence == answer.fence:
            return before
        lease.fence = answer.fence
        if lease.fence:
            self.held[key, token] = lease
        return lease

    @abc.abstractmethod
    async def take(self, lease: Lease, void: str | None) -> Won | Ready | Failed | Wait:
        """`acquire` for the key, token and holder of `lease`, which is not held yet."""

    @abc.abstractmethod
    async def look(self, key: str) -> Ready | Failed | Wait | None:
        """The answer that `acquire` would give a new token, without taking the lease. None: it is free."""

    @abc.abstractmethod
    async def renew(self, lease: Lease) -> bool:
        """`Lease.renew`. Makes a lease of another service known in this one. One without time left takes nothing."""

    @abc.abstractmethod
    async def ready(self, key: str, manifest: str, lease: Lease | None = None) -> None:
        """Announce that the key is in the store, and end `lease`. That is a fact and no right: anybody may say it."""

    @abc.abstractmethod
    async def fail(self, lease: Lease, log: str, where: str) -> bool:
        """`Lease.fail`."""

    @abc.abstractmethod
    async def release(self, lease: Lease) -> bool:
        """`Lease.release`; also of a lease that nobody knows to be held."""

    @abc.abstractmethod
    def watch(self, key: str) -> Watch:
        """A subscription to changes of `key`, active once it is entered."""

    @property
    def agreed(self) -> bool:
        """False while another node may use another service than this one, so that a lease may be given to both."""
        return True

    async def ping(self) -> None:  # noqa: B027 - a service in memory always answers
        """Return if the service answers. Raises `LeaseUnavailable`."""

    def breakers(self) -> list[dict[str, Any]]:
        """For people: the breakers of a chain of services, the first one's first; empty if there is one service only.

        Each has `service`, `state` (``"open"``: it is not used now), `opened` and `closed` (how often), and the latest `why`.
        """
        return []

    async def close(self) -> None:  # noqa: B027 - most services hold nothing
        """Let go of connections. Leases that are still held run out by themselves."""


class Watch(abc.ABC):
    """An entered watch misses no change of its key that happens after entering."""

    @abc.abstractmethod
    async def changed(self, timeout: float) -> bool:
        """Wait for a change, at most `timeout` seconds. True: the key may have changed since the last call."""

    @abc.abstractmethod
    async def __aenter__(self) -> Watch: ...

    @abc.abstractmethod
    async def __aexit__(self, *exc: object) -> None: ...


async def await_turn(
    service: LeaseService,
    key: str,
    token: str,
    holder: str,
    *,
    void: str | None = None,
    on_wait: Callable[[Wait], None] = lambda wait: None,
    stays: Callable[[Wait], bool] = lambda wait: True,
) -> Lease | Ready | Failed | None:
    """Acquire, or wait until there is another answer than `Wait`. Raises `LeaseUnavailable`.

    `stays` is asked before the wait begins: if it says no, that one command was all, nothing is held, and None is returned.
    Cancel to stop waiting; a lease that was won in that moment is in `service.held`.
    """
    answer = await service.acquire(key, token, holder, void=void)
    if not isinstance(answer, Wait):
        return answer
    if not stays(answer):
        return None
    async with service.watch(key) as watch:
        while True:
            answer = await service.acquire(key, token, holder, void=void)
            if not isinstance(answer, Wait):
                return answer
            on_wait(answer)
            bound = min(RECHECK * random.uniform(0.9, 1.1), max(answer.ttl, 0.01))
            await watch.changed(bound)


@asynccontextmanager
async def leased(service: LeaseService, key: str, token: str, ttl: float) -> AsyncIterator[bool]:
    """A block in which this agent has the lease of `key`, which is renewed until the end of the block. False: another has it.

    Raises `LeaseUnavailable`.
    """
    lease = await service.acquire(key, token, platform.node())
    if not isinstance(lease, Lease):
        yield False
        return
    lease.keep_alive(ttl)
    try:
        yield True
    finally:
        await lease.release()


async def within(seconds: float, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled after `seconds`. Raises `asyncio.TimeoutError`.

    Unlike `asyncio.wait_for` before Python 3.12 it never swallows a cancellation that arrives as the work ends: a claim that
    is cancelled must not go on waiting.
    """
    task = asyncio.ensure_future(work)
    task.add_done_callback(lambda t: t.cancelled() or t.exception())  # seen, also if we are cancelled twice
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    finally:
        if not task.done():
            await ended({task})
        elif not task.cancelled():
            task.exception()  # seen, though a cancellation may come first
    if not done:
        raise asyncio.TimeoutError
    return task.result()


async def happened(event: asyncio.Event, timeout: float) -> bool:
    """Wait for `event`, at most `timeout` seconds, and clear it. False: it was not set."""
    try:
        await within(timeout, event.wait())
    except asyncio.TimeoutError:
        return False
    event.clear()
    return True


async def ended(tasks: set[asyncio.Future[T]]) -> None:
    """Cancel `tasks` until the last one has ended: a library below (redis-py 5) may swallow a cancellation."""
    pending = {task for task in tasks if not task.done()}
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=0.1)
    await asyncio.gather(*tasks, return_exceptions=True)  # their errors are seen


def monotonic() -> float:
    """The clock of leases that live in this process, in seconds."""
    return time.monotonic()
