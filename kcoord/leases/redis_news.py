"""News of keys, from the agents that change them to all agents of a namespace, over one channel of Redis.

A question about each key costs the server some 8 µs for each node; news costs a node's part of a message. Deliveries are nodes ×
messages, some 10 µs of the server each: so messages keep a distance of 60 µs for each receiver, and more if they are long.
They carry up to 32 KiB of what has come together. Of two nodes none waits.
1,250 nodes were told in 64 ms in the median, 99 % in 191 ms.

The channel is the namespace's, not a job's: a key is named by its content, so what one job says of it is true for all, and jobs
without a name of their own share one. An agent follows it while its ranks ask for keys.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

import msgpack
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Ready, Wait, Watch, ended, happened, within
from kcoord.leases.facts import Facts
from kcoord.leases.redis_client import BROKEN, COMMAND_TIMEOUT, NONSENSE, repeated, why
from kcoord.leases.redis_news_script import RING, SCRIPT, SHA
from kcoord.telemetry.events import tell_if_failed

_MOST_AT_ONCE = 50  # facts of one call
_CAUGHT_UP = (
    32  # of the latest calls; thousands of agents may catch up in one moment, and the rest costs a question each
)
_TELLERS = 2  # of all agents that ask for a key
_TELLS_UNKNOWN = 1 / 16  # as long as nobody has told how many they are
_LONGEST_KEY, _LONGEST_HOLDER = 300, 1 << 10
_MANIFEST = re.compile(r"[\w.-]{1,256}", re.ASCII)
_SILENCE = 15.0  # seconds that the reader waits at a time
_RESTS = 60.0  # seconds; an agent that has asked for nothing for so long follows no more
_PAUSE, _LONGEST_PAUSE = 0.4, 5.0  # seconds between two attempts to follow
_LONGEST_DISTANCE = 1000.0  # milliseconds
_LONGEST_MESSAGE = 1 << 20  # bytes

Command = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


class _Doubted(RedisConnectionError):
    """A listener was ended for the sake of another connection, before its own was confirmed."""


class News:
    """Announces to the channel `name` what this agent has done, and tells `facts` what others have.

    ``ask(*command)`` sends a command, ``command(call)`` repeats such calls, or raises `LeaseUnavailable`; ``connect()`` is a
    connection of its own for the channel. `ttl`: seconds that a lease lasts.
    """

    def __init__(
        self,
        name: str,
        facts: Facts,
        ask: Callable[..., Awaitable[Any]],
        command: Command,
        connect: Callable[[], Awaitable[Any]],
        ttl: float,
    ) -> None:
        self._name, self._facts, self._ask, self._command, self._connect = name, facts, ask, command, connect
        self._ttl, self._me = ttl, uuid.uuid4().hex[:12]
        self._outgoing: list[tuple[Any, ...]] = []
        self._sender: asyncio.Task[None] | None = None
        self._listener: asyncio.Task[None] | None = None
        self._leaving: set[asyncio.Task[None]] = set()  # listeners that are doubted
        self._confirmed: asyncio.Future[None] | None = None  # done once the server has confirmed its subscription
        self._hurry = asyncio.Event()  # somebody waits for that
        self._connection: Any = None  # of the listener, while it follows
        self._verified: asyncio.Future[None] | None = None  # done once the server has confirmed it again
        self._failed = 0  # attempts to follow, in a row
        self._used = -math.inf

    # Announcing.

    def led(self, key: str, holder: str) -> None:
        """This agent leads the key. Nobody is told if nobody else follows: who comes later asks."""
        if self._facts.followers != 1:
            self._announce("L", key, holder, self._ttl)

    def ready(self, key: str, manifest: str) -> None:
        self._facts.hear(key, Ready(manifest))
        self._announce("R", key, manifest)

    def found(self, key: str, manifest: str) -> None:
        """The server says that the key is READY, maybe of an earlier job: of all agents that would ask, a few tell the others."""
        followers = self._facts.followers
        if random.random() * followers < _TELLERS if followers else random.random() < _TELLS_UNKNOWN:
            self._announce("R", key, manifest)

    def changed(self, key: str) -> None:
        """The key's lease has ended, and there is no artifact: whoever waits for it is to ask."""
        self._facts.hear(key, None)
        self._announce("C", key)

    async def publish(self, facts: bytes) -> float:
        """Seconds until the facts are due; 0: nothing is left to do. Raises `LeaseUnavailable`."""

        async def call() -> Any:
            try:
                return await self._ask("EVALSHA", SHA, 1, self._name, facts, RING)
            except NoScriptError:
                return await self._ask("EVAL", SCRIPT, 1, self._name, facts, RING)

        reply = await self._command(call)
        return min(max(reply, 0), _LONGEST_DISTANCE) / 1000 if isinstance(reply, int) else 0.0

    def _announce(self, *fact: Any) -> None:
        self._outgoing.append(fact)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
            self._sender.add_done_callback(lambda task: tell_if_failed(task, "other nodes are not told of keys"))

    async def _send(self) -> None:
        """Publish all that is announced. What the server cannot take is lost: whoever waits for it asks within seconds."""
        due_in = 0.0
        with suppress(LeaseUnavailable):
            while self._outgoing or due_in:
                await asyncio.sleep(due_in)
                batch, self._outgoing = self._outgoing[:_MOST_AT_ONCE], self._outgoing[_MOST_AT_ONCE:]
                said = msgpack.packb([self._me, batch], unicode_errors="surrogatepass") if batch else b""
                due_in = await self.publish(said)
        self._outgoing.clear()

    # Following.

    def use(self) -> None:
        """A key is about to be asked for: follow the news, from a moment on."""
        self._used = time.monotonic()
        if self._listener is None or self._listener.done():
            self._confirmed = asyncio.get_running_loop().create_future()
            self._hurry.clear()
            self._listener = asyncio.create_task(self._listen(self._confirmed))
            self._listener.add_done_callback(functools.partial(self._listened, self._confirmed))

    async def follow(self) -> None:
        """Return once every change is heard. Raises `LeaseUnavailable`, after 4 s at most."""
        self.use()
        if not self._facts.live:
            await self._confirmed_in_time(self._follow())

    async def verify(self) -> None:
        """Follow by a connection on which the server answers now: one may be dead, and nothing says so.

        Raises `LeaseUnavailable`, after 4 s at most.
        """
        self.use()
        await self._confirmed_in_time(self._verify() if self._facts.live else self._follow())

    async def _confirmed_in_time(self, confirmation: Coroutine[Any, Any, None]) -> None:
        try:
            await within(2 * COMMAND_TIMEOUT, confirmation)
        except asyncio.TimeoutError:
            raise LeaseUnavailable(f"Redis confirmed no subscription within {2 * COMMAND_TIMEOUT:g} s") from None
        except BROKEN as error:
            raise LeaseUnavailable(f"cannot subscribe: {why(error)}") from error

    async def _follow(self) -> None:
        while not self._facts.live:
            self.use()
            assert self._confirmed is not None
            self._hurry.set()
            with suppress(_Doubted):
                await asyncio.shield(self._confirmed)

    async def _verify(self) -> None:
        if self._verified is None or self._verified.done():
            self._verified = asyncio.get_running_loop().create_future()
        try:
            await self._connection.send_command("SUBSCRIBE", self._name)
            await within(COMMAND_TIMEOUT, asyncio.shield(self._verified))
        except BROKEN:
            self.doubt()
            await self._follow()

    def doubt(self) -> None:
        """The server may be gone, or be another one: forget what is known, and follow by a new connection when one is needed."""
        listener = self._let_go()
        if listener is not None:
            listener.cancel()

    def _let_go(self) -> asyncio.Task[None] | None:
        """While there is a listener whose subscription was confirmed, every change is heard: so one that ends is none."""
        listener, self._listener = self._listener, None
        self._facts.forget()
        if listener is not None:
            self._leaving.add(listener)
            listener.add_done_callback(self._leaving.discard)
        return listener

    def watch(self, key: str) -> Watch:
        return _KeyWatch(self, self._facts, key)

    async def close(self) -> None:
        """Publish what is announced, within 2 s, and follow no more."""
        if self._sender is not None:
            with suppress(asyncio.TimeoutError):
                await within(COMMAND_TIMEOUT, asyncio.shield(self._sender))
        self.doubt()
        await ended(self._leaving | ({self._sender} if self._sender is not None else set()))

    async def _listen(self, confirmed: asyncio.Future[None]) -> None:
        """Follow until the connection breaks, or nothing has been asked for a while."""
        made: list[Any] = []  # connections
        try:
            if self._failed:  # thousands of agents do not come back in one moment
                pause = min(_PAUSE * 2.0 ** min(self._failed - 1, 8), _LONGEST_PAUSE)
                await happened(self._hurry, pause * random.uniform(0.5, 1.5))
            connection = await within(2 * COMMAND_TIMEOUT, repeated(lambda: self._subscribed(made)))
            if self._is_current():
                self._connection = connection
                self._facts.begin()
                confirmed.set_result(None)
                await self._catch_up()
                await self._hear(connection)
        except BROKEN as error:
            self._failed += 1
            self._unconfirmed(confirmed, error)
        finally:
            if self._is_current():
                self._let_go()
            for each in made:
                with suppress(*BROKEN):
                    await each.disconnect(nowait=True)

    def _listened(self, confirmed: asyncio.Future[None], listener: asyncio.Task[None]) -> None:
        error = None if listener.cancelled() else listener.exception()
        if error is not None:
            self._failed += 1  # the next attempt is not made at once
        doubted = _Doubted("Connection closed by its user")
        self._unconfirmed(confirmed, doubted if error is None else RedisError(repr(error)))
        tell_if_failed(listener, "news of other nodes is not heard")

    def _unconfirmed(self, confirmed: asyncio.Future[None], error: BaseException) -> None:
        for promise in (confirmed, self._verified):
            if promise is not None and not promise.done():
                promise.set_exception(error)
                promise.exception()  # seen, also if nobody waits for it

    def _is_current(self) -> bool:
        """False once the connection is doubted: redis-py may swallow that its reader is cancelled."""
        return self._listener is asyncio.current_task()

    async def _subscribed(self, made: list[Any]) -> Any:
        """A new connection, which is in `made` as soon as it is there."""
        made.append(connection := await self._connect())
        await connection.send_command("SUBSCRIBE", self._name)
        reply = await connection.read_response(disconnect_on_error=False)
        if reply[:2] != [b"subscribe", self._name.encode()]:
            raise RedisError("Redis confirmed another subscription")
        return connection

    async def _catch_up(self) -> None:
        """Facts that were published before. Only what stays true counts: whoever led then may have ended since."""
        try:
            last = int(await self._command(lambda: self._ask("HGET", self._name, "last")) or 0)
            names = [str(number % RING) for number in range(last - _CAUGHT_UP + 1, last + 1)]
            facts = await self._command(lambda: self._ask("HMGET", self._name, *names))
            latest = {key: answer for each in facts for _, key, answer in _decoded(each or b"")}
            for key, answer in latest.items():
                if isinstance(answer, Ready):
                    self._facts.hear_old(key, answer)
        except (LeaseUnavailable, *NONSENSE):
            self._failed += 1
        else:
            self._failed = 0

    async def _hear(self, connection: Any) -> None:
        while self._is_current() and (self._facts.watched or time.monotonic() < self._used + _RESTS):
            message = await connection.read_response(timeout=_SILENCE, disconnect_on_error=False)
            if message is None:
                continue
            kind, _, told = message
            if kind == b"message":
                if len(told) > _LONGEST_MESSAGE:  # of somebody else; who follows anew wakes all
                    raise RedisError("news is too long")
                self._take(told)
            elif kind == b"subscribe" and self._verified is not None and not self._verified.done():
                self._verified.set_result(None)

    def _take(self, message: bytes) -> None:
        followers, _, facts = message.partition(b" ")
        self._facts.followers = int(followers[:6]) if followers.isdigit() else 0
        for who, key, answer in _decoded(facts):
            if who != self._me:
                self._facts.hear(key, answer)


class _KeyWatch(Watch):
    def __init__(self, news: News, facts: Facts, key: str) -> None:
        self._news, self._facts, self._key, self._event = news, facts, key, asyncio.Event()

    async def __aenter__(self) -> _KeyWatch:
        self._facts.watch(self._key, self._event)
        entered = False
        try:
            await self._news.follow()
            entered = True
        finally:
            if not entered:
                self._facts.unwatch(self._key, self._event)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._facts.unwatch(self._key, self._event)

    async def changed(self, timeout: float) -> bool:
        self._news.use()  # it may have broken off
        return await happened(self._event, timeout)


def _decoded(facts: bytes) -> Iterator[tuple[str, str, Ready | Wait | None]]:
    """Each fact: the agent that says it, the key, and its answer. Others may write to the channel: the rest is left out."""
    unpacker = msgpack.Unpacker(max_buffer_size=max(len(facts), 1), unicode_errors="replace")
    unpacker.feed(facts)
    with suppress(ValueError, msgpack.exceptions.UnpackException):
        for said in unpacker:
            match said:
                case [str(who), list(stated)]:
                    yield from ((who, *fact) for each in stated if (fact := _fact(each)) is not None)


def _fact(stated: Any) -> tuple[str, Ready | Wait | None] | None:
    match stated:
        case ["R", str(key), str(manifest)] if _MANIFEST.fullmatch(manifest):
            answer: Ready | Wait | None = Ready(manifest)
        case ["L", str(key), str(holder), int() | float() as ttl] if ttl > 0:
            answer = Wait(holder[:_LONGEST_HOLDER], float(ttl))
        case ["C", str(key)]:
            answer = None
        case _:
            return None
    return (key, answer) if len(key) <= _LONGEST_KEY else None
