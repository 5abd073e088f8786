"""Being woken by Redis: one Pub/Sub connection for all watches of an agent."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Watch, ended, within

T = TypeVar("T")

COMMAND_TIMEOUT = 2.0  # seconds for one command, its connection included


async def twice(command: Callable[[], Awaitable[T]], client: aioredis.Redis) -> T:
    """A restart breaks the connections that the pool keeps, and that says nothing about the server. Every command may be
    repeated."""
    try:
        return await command()
    except RedisConnectionError:
        await client.connection_pool.disconnect(inuse_connections=False)
        return await command()


class News:
    """One Pub/Sub connection for all watches of an agent.

    Invariant: a key in `_active` is subscribed to on the living connection. After a reconnection every watch is woken,
    because what happened in between was not heard.
    """

    def __init__(self, client: aioredis.Redis) -> None:
        self._client = client
        self._pubsub = client.pubsub(ignore_subscribe_messages=False)
        self._events: dict[str, set[asyncio.Event]] = {}
        self._active: dict[str, asyncio.Event] = {}
        self._reader: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()  # protects the connection from two senders

    async def subscribe(self, channel: str, event: asyncio.Event) -> None:
        """Return once the server has confirmed. Raises `LeaseUnavailable`."""
        self._events.setdefault(channel, set()).add(event)
        try:
            if channel not in self._active:
                self._active[channel] = asyncio.Event()
                await asyncio.shield(self._later(self._open(channel)))  # others may wait for the same confirmation
            await within(2 * COMMAND_TIMEOUT, self._active[channel].wait())
        except (RedisError, OSError, asyncio.TimeoutError, KeyError) as error:
            self._active.pop(channel, None)
            self._forget(channel, event)
            raise LeaseUnavailable(f"cannot subscribe: {type(error).__name__}: {error}") from error
        except asyncio.CancelledError:
            self._later(self.unsubscribe(channel, event))
            raise

    async def unsubscribe(self, channel: str, event: asyncio.Event) -> None:
        self._forget(channel, event)
        if channel in self._events or self._active.pop(channel, None) is None:
            return
        try:
            await self._send(self._pubsub.unsubscribe, channel)
        except (RedisError, OSError, asyncio.TimeoutError):
            return  # the reader finds the broken connection, and mends it

    async def close(self) -> None:
        await ended(self._tasks | ({self._reader} if self._reader is not None else set()))
        try:
            await within(COMMAND_TIMEOUT, self._pubsub.aclose())  # type: ignore[no-untyped-call]
        except (RedisError, OSError, asyncio.TimeoutError):
            return  # the server is gone, and with it the connection

    async def _open(self, channel: str) -> None:
        await self._send(self._pubsub.subscribe, channel)
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())

    def _later(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` whether or not its caller is cancelled; whoever awaits it sees its error."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        return task

    async def _send(self, command: Any, channel: str) -> None:
        async with self._sending:
            await within(COMMAND_TIMEOUT, twice(lambda: command(channel), self._client))

    def _forget(self, channel: str, event: asyncio.Event) -> None:
        events = self._events.get(channel, set())
        events.discard(event)
        if not events:
            self._events.pop(channel, None)

    async def _read(self) -> None:
        while True:
            try:
                message = await self._pubsub.get_message(timeout=30.0)
            except (RedisError, OSError, asyncio.TimeoutError):
                await asyncio.sleep(random.uniform(0.2, 0.6))
                self._wake_all()
                continue
            if message is None:
                if not self._pubsub.subscribed:
                    await asyncio.sleep(0.02)
                continue
            channel = message["channel"].decode()
            if message["type"] == "subscribe" and channel in self._active:
                self._active[channel].set()
            for event in self._events.get(channel, ()):
                event.set()

    def _wake_all(self) -> None:
        for events in self._events.values():
            for event in events:
                event.set()


class Subscription(Watch):
    def __init__(self, news: News, channel: str) -> None:
        self._news, self._channel, self._event = news, channel, asyncio.Event()

    async def __aenter__(self) -> Subscription:
        await self._news.subscribe(self._channel, self._event)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._news.unsubscribe(self._channel, self._event)

    async def changed(self, timeout: float) -> bool:
        try:
            await within(timeout, self._event.wait())
        except asyncio.TimeoutError:
            return False
        self._event.clear()
        return True
