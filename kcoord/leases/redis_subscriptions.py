"""Pub/Sub of Redis: one connection for all watches of an agent.

redis-py's own `PubSub` reconnects in the task that meets the broken connection first, reader or sender; two at once read each
other's answers. Here a broken connection is replaced by a new one, under a lock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import redis.asyncio as aioredis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Watch, ended, happened, within
from kcoord.leases.redis_client import COMMAND_TIMEOUT, NONSENSE, repeated, why

_SILENCE = 30.0  # seconds that the reader waits at a time


class Subscriptions:
    """One Pub/Sub connection for all watches of an agent.

    Invariant: a channel in `_active` whose future is done is subscribed to on the living connection, or will be on the next.
    After a reconnection every watch is woken, since messages in between were lost.
    """

    def __init__(self, client: aioredis.Redis) -> None:
        self._client = client
        self._connection: Any = None
        self._events: dict[str, set[asyncio.Event]] = {}
        self._active: dict[str, asyncio.Future[None]] = {}  # channel → done once the server has confirmed
        self._reader: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._sending = asyncio.Lock()  # one task at a time sends, or connects

    async def subscribe(self, channel: str, event: asyncio.Event) -> None:
        """Return once the server has confirmed. Raises `LeaseUnavailable`, after 4 s at most."""
        self._events.setdefault(channel, set()).add(event)
        patience = COMMAND_TIMEOUT if self._connection is not None else 2 * COMMAND_TIMEOUT
        confirmed = self._active.get(channel)
        if confirmed is None:
            confirmed = self._active[channel] = asyncio.get_running_loop().create_future()
            confirmed.add_done_callback(lambda future: future.exception())  # seen, also if nobody waits any more
            self._later(self._open(channel, confirmed))  # others may wait for it when the first caller is cancelled
        try:
            await within(patience, asyncio.shield(confirmed))
        except asyncio.CancelledError:
            self._later(self.unsubscribe(channel, event))
            raise
        except asyncio.TimeoutError as error:
            self._failed(channel, confirmed, error)
            self._forget(channel, event)
            await self._drop(self._connection)  # its host may have vanished; TCP would send for ever
            raise LeaseUnavailable(f"Redis confirmed no subscription within {patience:g} s") from None
        except (RedisError, OSError, *NONSENSE) as error:
            self._forget(channel, event)
            raise LeaseUnavailable(f"cannot subscribe: {why(error)}") from error

    async def unsubscribe(self, channel: str, event: asyncio.Event) -> None:
        self._forget(channel, event)
        if channel in self._events or self._active.pop(channel, None) is None:
            return
        async with self._sending:
            if channel in self._active or self._connection is None:
                return
            try:
                await within(COMMAND_TIMEOUT, self._connection.send_command("UNSUBSCRIBE", channel))
            except (RedisError, OSError, asyncio.TimeoutError, *NONSENSE):
                await self._drop(self._connection)

    async def close(self) -> None:
        await ended(self._tasks | ({self._reader} if self._reader is not None else set()))
        if self._connection is not None:
            with suppress(RedisError, OSError, asyncio.TimeoutError):
                await within(COMMAND_TIMEOUT, self._connection.disconnect())

    async def _open(self, channel: str, confirmed: asyncio.Future[None]) -> None:
        async def send() -> None:
            connection = self._connection or await self._connect()
            try:
                await connection.send_command("SUBSCRIBE", channel)
            except BaseException:
                await self._drop(connection)
                raise

        try:
            async with self._sending:
                if self._active.get(channel) is not confirmed:
                    return  # given up while others were sending
                await within(COMMAND_TIMEOUT, repeated(send))
        except (RedisError, OSError, asyncio.TimeoutError, *NONSENSE) as error:
            self._failed(channel, confirmed, error)
            return
        if self._reader is None or self._reader.done():
            self._reader = asyncio.create_task(self._read())

    async def _connect(self) -> Any:
        """A new connection, subscribed to every active channel. The caller has the lock."""
        connection = self._client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
            if self._active:
                await connection.send_command("SUBSCRIBE", *self._active)
        except BaseException:
            await self._drop(connection)
            raise
        self._connection = connection
        return connection

    async def _drop(self, connection: Any) -> None:
        """Close `connection`; its reader meets its end."""
        if connection is None:
            return
        if self._connection is connection:
            self._connection = None
        with suppress(RedisError, OSError, asyncio.TimeoutError):
            await connection.disconnect(nowait=True)

    def _failed(self, channel: str, confirmed: asyncio.Future[None], error: BaseException) -> None:
        """Raise `error` for everybody who waits for this confirmation."""
        if not confirmed.done():
            confirmed.set_exception(error)
        if self._active.get(channel) is confirmed:
            del self._active[channel]

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` whether or not its caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda t: t.cancelled() or t.exception())

    def _forget(self, channel: str, event: asyncio.Event) -> None:
        events = self._events.get(channel, set())
        events.discard(event)
        if not events:
            self._events.pop(channel, None)

    async def _read(self) -> None:
        connection = None
        while True:
            try:
                async with self._sending:
                    if self._connection is None and not self._active:
                        return  # the next subscription connects and reads again: idle agents leave a server alone
                    connection = self._connection or await self._connect_again()
                message = await connection.read_response(timeout=_SILENCE, disconnect_on_error=False)
                if message is not None:
                    self._heard(message)
            except ResponseError as error:  # the user may not SUBSCRIBE; the reply does not name the channel
                self._all_failed(error)
            except (RedisError, OSError, asyncio.TimeoutError, *NONSENSE):
                await self._drop(connection)
                await asyncio.sleep(random.uniform(0.2, 0.6))
                self._wake_all()

    async def _connect_again(self) -> Any:
        try:
            return await within(2 * COMMAND_TIMEOUT, self._connect())
        except (RedisError, OSError, asyncio.TimeoutError, *NONSENSE) as error:
            self._all_failed(error)
            raise RedisConnectionError(str(error)) from error

    def _all_failed(self, error: BaseException) -> None:
        for channel, confirmed in list(self._active.items()):
            if not confirmed.done():
                self._failed(channel, confirmed, error)

    def _heard(self, message: list[Any]) -> None:
        kind, channel = message[0], message[1].decode()
        confirmed = self._active.get(channel)
        if kind == b"subscribe" and confirmed is not None and not confirmed.done():
            confirmed.set_result(None)
        for event in self._events.get(channel, ()):
            event.set()

    def _wake_all(self) -> None:
        for events in self._events.values():
            for event in events:
                event.set()


class Subscription(Watch):
    """A watch of the key that `channel` is named after."""

    def __init__(self, subscriptions: Subscriptions, channel: str) -> None:
        self._subscriptions, self._channel, self._event = subscriptions, channel, asyncio.Event()

    async def __aenter__(self) -> Subscription:
        await self._subscriptions.subscribe(self._channel, self._event)
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._subscriptions.unsubscribe(self._channel, self._event)

    async def changed(self, timeout: float) -> bool:
        return await happened(self._event, timeout)
