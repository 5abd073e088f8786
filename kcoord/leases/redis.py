"""Leases in Redis: one hash per key, one Lua script with an operation argument, Pub/Sub to wake.

The script touches one key, so it runs on Redis Cluster, if one server has all keys; it reads the server's clock, so hosts need
not agree on the time; a repeated call with the same token gets the same answer, so a lost reply is harmless.

Timeline of what the token is for::

    agent A  acquire(a) → Won            …partitioned…           ready(a): a fact, accepted
    agent B                    acquire(b) → Wait  …TTL…  → Won   renew(b) → 1
    agent A                                                      renew(a) → 0: lost, A's compile goes on, harmless

When the server's clock is set: forward, what it holds ends early; a holder takes its lease again at its next renewal, unless a
waiter came first, which costs one compile more. Back: what somebody asks for lasts no longer than its whole TTL from then on,
and a lease never longer than its limit by its holder's own clock. Fences do not grow over a clock that was set back *and* a key
that was gone.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from redis.exceptions import NoPermissionError, NoScriptError, RedisError, ResponseError

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Answer, Failed, LeaseService, Ready, Wait, Watch, Won, ended, monotonic, within
from kcoord.leases.redis_client import (
    COMMAND_TIMEOUT,
    CONNECTIONS,
    NONSENSE,
    connect,
    is_of_a_cluster,
    is_of_another_master,
    repeated,
    why,
)
from kcoord.leases.redis_script import FOREIGN, SCRIPT, SHA
from kcoord.leases.redis_subscriptions import News, Subscription
from kcoord.telemetry.events import log, tell_bug

T = TypeVar("T")

_READY_TTL = 7 * 86400.0  # seconds; after it the store is looked at again, once
_LONGEST_LOG = 32 << 10  # characters
_LONGEST_WORD = 1 << 10
_REMEMBERED = 10_000
_SHARDS_TRIED = 16  # keys: of two shards one is asked for none of them once in 30,000 times


@dataclass(frozen=True)
class _Held:
    """What this agent knows of a lease of its own. `limit`: its hard limit, on this process's clock."""

    holder: str
    fence: int
    limit: float


_ENDED = _Held("", 0, 0.0)
"""The lease was given up: a renewal that comes late does not take it again."""


class RedisLeases(LeaseService):
    """Leases in one Redis. `prefix` starts every key that it uses; `tell` gets one line for people, once.

    Raises `SettingsError` if the URL has an option that there is not.
    """

    name = "Redis"

    def __init__(
        self,
        url: str,
        prefix: str,
        *,
        ttl: float,
        limit: float,
        failure_ttl: float,
        tell: Callable[[str], object] = log.warning,
    ) -> None:
        self._prefix, self._tell, self._told = prefix, tell, False
        self._ttl_ms, self._limit_ms = int(ttl * 1000), int(limit * 1000)
        self._failure_ms = int(failure_ttl * 1000)
        self._redis, self._sentinels = connect(url)
        self._news = News(self._redis)
        self._slots = asyncio.Semaphore(CONNECTIONS - 2)  # the pool refuses what it has no connection for
        self._trial: asyncio.Task[None] | None = None
        self._divided = False  # a key was another server's: this is one of a Redis Cluster
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()  # the oldest are forgotten first

    def _key(self, key: str) -> str:
        return f"{self._prefix}:lease:{key}"

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        await self._tried_once()
        answer = _parse(await self._run(key, "acquire", token, holder, self._ttl_ms, self._limit_ms, void or ""))
        if isinstance(answer, Won):
            held = self._held.get((key, token))
            if held is None or held.fence != answer.fence:
                self._hold(key, token, _Held(holder, answer.fence, monotonic() + self._limit_ms / 1000))
        return answer

    async def _tried_once(self) -> None:
        """Before the first lease: what only some nodes come to need, such as SUBSCRIBE, would else divide those that have it
        from those that were refused."""
        if self._trial is None:
            self._trial = asyncio.create_task(self.ping())
            self._trial.add_done_callback(self._tried)
        await asyncio.shield(self._trial)

    def _tried(self, trial: asyncio.Task[None]) -> None:
        """All who waited for it may be cancelled. One that failed is followed by another, for the next lease."""
        if trial.cancelled() or (error := trial.exception()) is None:
            return
        self._trial = None
        if not isinstance(error, LeaseUnavailable):
            tell_bug(error, "Redis was not tried", self._tell)

    async def renew(self, key: str, token: str) -> bool:
        held = self._held.get((key, token))
        if held is None:  # leased while another service stood in for this one
            held = self._hold(key, token, _Held(token, 0, monotonic() + self._limit_ms / 1000))
        left_ms = int((held.limit - monotonic()) * 1000)
        return bool(await self._run(key, "renew", token, self._ttl_ms, held.holder, left_ms))

    async def ready(self, key: str, token: str, manifest: str) -> None:
        self._hold(key, token, _ENDED)
        await self._run(key, "ready", token, manifest, int(_READY_TTL * 1000))

    async def fail(self, key: str, token: str, log: str, where: str) -> bool:
        self._hold(key, token, _ENDED)
        return bool(await self._run(key, "fail", token, log[-_LONGEST_LOG:], where, self._failure_ms))

    async def release(self, key: str, token: str) -> bool:
        self._hold(key, token, _ENDED)
        return bool(await self._run(key, "release", token))

    def _hold(self, key: str, token: str, held: _Held) -> _Held:
        self._held[key, token] = held
        self._held.move_to_end((key, token))
        if len(self._held) > _REMEMBERED:
            self._held.popitem(last=False)
        return held

    async def ping(self) -> None:
        """A lease is taken and released, and a subscription confirmed.

        PING is no question: a replica, a full server, or one whose user may not write or subscribe, answers it. A server of a
        cluster may have one key and not the next: then many are tried.
        """
        keys = [f"ping-{uuid.uuid4().hex}" for _ in range(_SHARDS_TRIED if self._divided else 1)]
        async with self.watch(keys[0]):
            for key in keys:
                await self._run(key, "acquire", key, key, self._ttl_ms, self._limit_ms, "")
                await self._run(key, "release", key)
        self._divided = False

    def watch(self, key: str) -> Watch:
        return Subscription(self._news, self._key(key))

    async def add_up(
        self, job: str, agent: str, counters: dict[str, float], read: bool = True
    ) -> dict[str, dict[str, float]]:
        """Store this agent's counters of `job` for a day, and return those of all its agents, or nothing without `read`.

        Reading costs as much as the job has nodes: an agent that saves its counters every second must not.
        """
        name = f"{self._prefix}:stats:{job}"
        fields = {f"{agent}|{counter}": repr(value) for counter, value in counters.items()}

        async def exchange() -> list[Any]:
            pipe = self._redis.pipeline(transaction=False)
            if fields:
                pipe.hset(name, mapping=cast(Any, fields))
                pipe.expire(name, 86400)
            if read:
                pipe.hgetall(name)
            return await pipe.execute()

        if not (read or fields):
            return {}
        replies = await self._bounded(exchange)
        found: dict[str, dict[str, float]] = {}
        try:
            for field, value in replies[-1].items() if read else ():
                who, _, counter = field.decode(errors="replace").rpartition("|")
                found.setdefault(who, {})[counter] = float(value)
        except NONSENSE as error:
            raise LeaseUnavailable(f"Redis holds something that kcoord did not write: {error}") from error
        return found

    async def server_version(self) -> str:
        """As INFO gives it; "unknown" if the user may not ask. Raises `LeaseUnavailable`."""
        try:
            info = await self._bounded(lambda: self._redis.info("server"))
        except LeaseUnavailable as error:
            if isinstance(error.__cause__, NoPermissionError):
                return "unknown"
            raise
        return str(info.get("redis_version", "unknown"))

    async def close(self) -> None:
        if self._trial is not None:
            await ended({self._trial})
        await self._news.close()
        for client in (self._redis, *self._sentinels):
            try:
                await within(COMMAND_TIMEOUT, client.aclose())
            except (RedisError, OSError, asyncio.TimeoutError):
                continue  # the server is gone, and with it the connection

    async def _run(self, key: str, op: str, token: str, *args: str | int) -> Any:
        name = self._key(key)
        try:
            return await self._script(name, op, token, *args)
        except ResponseError as error:
            what = str(error).partition(FOREIGN)[2].strip()
        if not self._told:
            self._told = True
            self._tell(f"Redis held {what} under {name}, which kcoord did not write; such keys are removed")
        try:
            return await self._script(name, op, token, *args)
        except ResponseError as error:
            raise LeaseUnavailable(f"somebody else writes to {name} in Redis: {error}") from error

    async def _script(self, name: str, op: str, token: str, *args: str | int) -> Any:
        """Raises `LeaseUnavailable`, and ResponseError for a key that was not kcoord's and is free now."""
        try:
            return await self._bounded(lambda: self._redis.evalsha(SHA, 1, name, op, token, *args))
        except NoScriptError:
            return await self._bounded(lambda: self._redis.eval(SCRIPT, 1, name, op, token, *args))

    async def _bounded(self, command: Callable[[], Awaitable[T]]) -> T:
        try:
            return await within(2 * COMMAND_TIMEOUT, self._in_turn(command))
        except NoScriptError:
            raise
        except asyncio.TimeoutError:
            raise LeaseUnavailable(f"Redis did not answer within {2 * COMMAND_TIMEOUT:g} s") from None
        except (RedisError, OSError, *NONSENSE) as error:
            if isinstance(error, ResponseError) and FOREIGN in str(error):
                raise
            self._divided = self._divided or is_of_a_cluster(error)
            if is_of_another_master(error):  # its address is perhaps where ours came from
                with suppress(RedisError, OSError, asyncio.TimeoutError):
                    await within(COMMAND_TIMEOUT, self._redis.connection_pool.disconnect(inuse_connections=False))
            raise LeaseUnavailable(why(error)) from error

    async def _in_turn(self, command: Callable[[], Awaitable[T]]) -> T:
        async with self._slots:
            return await repeated(command, self._redis)


def _parse(reply: Any) -> Answer:
    try:
        kind, *rest = (part.decode(errors="replace") if isinstance(part, bytes) else part for part in reply)
        if None in rest:
            raise ValueError(f"{reply!r} lacks a field")
        if kind == "W":
            return Won(int(rest[0]))
        if kind == "R":
            return Ready(rest[0])
        if kind == "F":
            return Failed(
                rest[0][-_LONGEST_LOG:], rest[1][:_LONGEST_WORD]
            )  # more than a frame holds could be told to nobody
        if kind == "L":
            return Wait(rest[0][:_LONGEST_WORD], max(0, int(rest[1])) / 1000)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise LeaseUnavailable(f"Redis holds something that kcoord did not write: {error}") from error
    raise LeaseUnavailable(f"Redis holds something that kcoord did not write: {reply!r}")
