"""The lease interface: a time-bounded, fenced right to compile a key, and the news of how it ended.

A lease saves work and guarantees nothing else. At most one unexpired lease per key exists in a healthy service; after a
partition, a failover or a flush there may be two leaders, and both may publish: artifacts are addressed by their key and
published by a rename that one writer wins, so the second costs time and harms nothing.

The algorithm (`await_turn`: subscribe, *then* check, else a wake-up is lost) is here; a service brings four commands and a
way to be woken.
"""

from __future__ import annotations

import abc
import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.telemetry.events import tell_if_failed

T = TypeVar("T")

_RECHECK = 2.0  # seconds; a lost wake-up costs at most this much


@dataclass(frozen=True)
class Won:
    """The lease is ours. `fence` grows with every lease of the key; `coordinated` is False if nobody else was asked."""

    fence: int
    coordinated: bool = True


@dataclass(frozen=True)
class Ready:
    """The key is in the store; `manifest` is the SHA-256 of its manifest."""

    manifest: str


@dataclass(frozen=True)
class Failed:
    """The key failed to compile a moment ago. `log` is the leader's, `where` says where that was."""

    log: str
    where: str = ""


@dataclass(frozen=True)
class Wait:
    """`holder` is compiling; its lease ends in `ttl` seconds if it is not renewed."""

    holder: str
    ttl: float


Answer = Won | Ready | Failed | Wait


class LeaseService(abc.ABC):
    """One service, used by one agent. A token names one claim of one agent; all commands are idempotent by it.

    Every command raises `LeaseUnavailable` if the service cannot be reached within a bound of its own.
    """

    name: str

    @abc.abstractmethod
    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        """Take the lease if it is free, or say why not.

        `void` is the manifest of a READY that turned out to be untrue (the artifact is gone, or broken): that READY, and
        no other, is forgotten first.
        """

    @abc.abstractmethod
    async def renew(self, key: str, token: str) -> bool:
        """Hold on for another TTL. False: another token has it, the hard limit has passed, or the token has given it up.

        A service that several nodes share takes a free lease again (it may have been emptied), also for a token that it does
        not know: that is how what was leased in another service is made known in this one.
        """

    @abc.abstractmethod
    async def ready(self, key: str, token: str, manifest: str) -> None:
        """Announce that the key is in the store. That is a fact and no right: any token may say it."""

    @abc.abstractmethod
    async def fail(self, key: str, token: str, log: str, where: str) -> bool:
        """End the lease with a failed compile, which is remembered for a while. False: another token has it."""

    @abc.abstractmethod
    async def release(self, key: str, token: str) -> bool:
        """Give the lease back, uncompiled; a waiter may take it at once. False: another token has it."""

    @abc.abstractmethod
    def watch(self, key: str) -> Watch:
        """A subscription to changes of `key`, active once it is entered."""

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
) -> Won | Ready | Failed | None:
    """Acquire, or wait until there is another answer than `Wait`. Cancel to stop waiting; raises `LeaseUnavailable`.

    `stays` is asked before the wait begins: if it says no, that one command was all, nothing is held, and None is returned.
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
            bound = min(_RECHECK * random.uniform(0.9, 1.1), max(answer.ttl, 0.01))
            await watch.changed(bound)


@asynccontextmanager
async def kept_alive(
    service: LeaseService,
    key: str,
    token: str,
    ttl: float,
    on_lost: Callable[[], None] = lambda: None,
) -> AsyncIterator[None]:
    """Renew the lease every third of `ttl` while the block runs. A lost lease is told once, and stops nothing."""
    task = asyncio.create_task(_renew(service, key, token, ttl, on_lost))
    task.add_done_callback(_renewed)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _renew(service: LeaseService, key: str, token: str, ttl: float, on_lost: Callable[[], None]) -> None:
    while True:
        await asyncio.sleep(ttl / 3)
        try:
            held = await service.renew(key, token)
        except LeaseUnavailable:
            continue  # the service may be back before the TTL has run out
        if not held:
            on_lost()
            return


def _renewed(task: asyncio.Task[None]) -> None:
    tell_if_failed(task, "a lease is not renewed any more")


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
