"""Leases in Redis: one hash per key, one Lua script with an operation argument, Pub/Sub to wake.

The script touches one key, so it runs on Redis Cluster; it reads the server's clock, so hosts need not agree on the
time; a repeated call with the same token gets the same answer, so a lost reply is harmless.

Timeline of what the token is for::

    agent A  acquire(a) → Won            …partitioned…           ready(a): a fact, accepted
    agent B                    acquire(b) → Wait  …TTL…  → Won   renew(b) → 1
    agent A                                                      renew(a) → 0: lost, A's compile goes on, harmless
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import redis.asyncio as aioredis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisError

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Answer, Failed, LeaseService, Ready, Wait, Watch, Won, monotonic, within
from kcoord.leases.redis_news import COMMAND_TIMEOUT, News, Subscription, twice

T = TypeVar("T")

_READY_TTL = 7 * 86400.0  # seconds; after it the store is looked at again, once
_LONGEST_LOG = 32 << 10  # characters
_CONNECTIONS = 8  # of one agent: thousands of nodes share a server that takes 10,000
_REMEMBERED = 10_000

# KEYS[1]  the key's hash: state L|R|F, token, holder, fence, limit (µs, server clock), ttl (ms), manifest, log, where
# ARGV     op, token, and then
#   acquire  holder, ttl_ms, limit_ms, void manifest or ''  → {'W', fence} | {'R', manifest} | {'F', log, where}
#                                                             | {'L', holder, ms left}
#   renew    ttl_ms, holder, ms left of the hard limit      → 1 | 0
#   ready    manifest, ttl_ms                               → 1
#   fail     log, where, ttl_ms                             → 1 | 0
#   release                                                 → 1 | 0
# Every change is published on the channel named like the key. An expired lease is a hash that is gone. `renew` takes
# the lease again if the hash is gone (FLUSHALL, an empty restart): its holder is alive, and nobody else has it. A hash
# that the hard limit removed is gone as well: so the holder says how much of its limit is left.
_SCRIPT = """
local key, op, token = KEYS[1], ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local held = redis.call('HMGET', key, 'state', 'token', 'fence', 'limit', 'ttl')
local state, owner = held[1], held[2]

local function lease(holder, ttl_ms, limit_ms)
  local fence = math.max((tonumber(held[3]) or 0) + 1, now)
  redis.call('DEL', key)
  redis.call('HSET', key, 'state', 'L', 'token', token, 'holder', holder,
             'fence', string.format('%.0f', fence), 'limit', string.format('%.0f', now + limit_ms * 1000), 'ttl', ttl_ms)
  redis.call('PEXPIRE', key, math.min(ttl_ms, limit_ms))
  return string.format('%.0f', fence)
end

if op == 'acquire' then
  local holder, ttl_ms, limit_ms, void = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
  -- a server's clock that was set back would keep what is to end for as much longer
  if redis.call('PTTL', key) > (tonumber(held[5]) or math.huge) then redis.call('PEXPIRE', key, held[5]) end
  if state == 'R' then
    local manifest = redis.call('HGET', key, 'manifest')
    if manifest ~= void then return {'R', manifest} end
  elseif state == 'F' then
    return {'F', redis.call('HGET', key, 'log'), redis.call('HGET', key, 'where')}
  elseif state == 'L' and owner == token then
    return {'W', held[3]}
  elseif state == 'L' then
    local left_ms = redis.call('PTTL', key)
    if left_ms >= 0 then return {'L', redis.call('HGET', key, 'holder'), left_ms} end
  end
  return {'W', lease(holder, ttl_ms, limit_ms)}
end

if op == 'ready' then
  redis.call('DEL', key)
  redis.call('HSET', key, 'state', 'R', 'manifest', ARGV[3], 'fence', held[3] or '0', 'ttl', ARGV[4])
  redis.call('PEXPIRE', key, tonumber(ARGV[4]))
  redis.call('PUBLISH', key, 'ready')
  return 1
end

if op == 'renew' and not state then
  if tonumber(ARGV[5]) <= 0 then return 0 end
  lease(ARGV[4], tonumber(ARGV[3]), tonumber(ARGV[5]))
  return 1
end

if state ~= 'L' or owner ~= token then return 0 end

if op == 'renew' then
  -- the holder's own clock never goes back: whichever limit comes first holds
  local left_ms = math.min((tonumber(held[4]) - now) / 1000, tonumber(ARGV[5]))
  if left_ms <= 0 then return 0 end
  redis.call('PEXPIRE', key, math.floor(math.min(tonumber(ARGV[3]), left_ms)) + 1)
elseif op == 'fail' then
  redis.call('DEL', key)
  redis.call('HSET', key, 'state', 'F', 'log', ARGV[3], 'where', ARGV[4], 'fence', held[3], 'ttl', ARGV[5])
  redis.call('PEXPIRE', key, tonumber(ARGV[5]))
  redis.call('PUBLISH', key, 'failed')
elseif op == 'release' then
  redis.call('DEL', key)
  redis.call('PUBLISH', key, 'free')
else
  return redis.error_reply('kcoord: unknown operation ' .. op)
end
return 1
"""
_SHA = hashlib.sha1(_SCRIPT.encode()).hexdigest()


@dataclass(frozen=True)
class _Held:
    """What this agent knows of a lease of its own. `limit`: its hard limit, on this process's clock."""

    holder: str
    fence: int
    limit: float


_ENDED = _Held("", 0, 0.0)
"""The lease was given up: a renewal that comes late does not take it again."""


class RedisLeases(LeaseService):
    """Leases in one Redis. `prefix` starts every key that it uses."""

    name = "Redis"

    def __init__(self, url: str, prefix: str, *, ttl: float, limit: float, failure_ttl: float) -> None:
        self._prefix = prefix
        self._ttl_ms, self._limit_ms = int(ttl * 1000), int(limit * 1000)
        self._failure_ms = int(failure_ttl * 1000)
        # redis-py's defaults run from waiting for ever (5) to retrying for a minute (8): state all of them
        self._redis = aioredis.Redis.from_url(
            url,
            socket_timeout=COMMAND_TIMEOUT,
            socket_connect_timeout=COMMAND_TIMEOUT,
            **({} if url.startswith("unix:") else {"socket_keepalive": True}),
            health_check_interval=0,
            retry=Retry(NoBackoff(), 0),
            retry_on_error=[],
            max_connections=_CONNECTIONS,
            encoding_errors="replace",
            decode_responses=False,
            protocol=2,
        )
        self._news = News(self._redis)
        self._slots = asyncio.Semaphore(_CONNECTIONS - 2)  # the pool refuses what it has no connection for
        self._held: OrderedDict[tuple[str, str], _Held] = OrderedDict()  # the oldest are forgotten first

    def _key(self, key: str) -> str:
        return f"{self._prefix}:lease:{key}"

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        answer = _parse(await self._run(key, "acquire", token, holder, self._ttl_ms, self._limit_ms, void or ""))
        if isinstance(answer, Won):
            held = self._held.get((key, token))
            if held is None or held.fence != answer.fence:
                self._hold(key, token, _Held(holder, answer.fence, monotonic() + self._limit_ms / 1000))
        return answer

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
        await self._bounded(lambda: cast(Awaitable[Any], self._redis.ping()))

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
        stored = replies[-1] if read else {}
        found: dict[str, dict[str, float]] = {}
        for field, value in stored.items():
            who, _, counter = field.decode(errors="replace").rpartition("|")
            try:
                found.setdefault(who, {})[counter] = float(value)
            except ValueError as error:
                raise LeaseUnavailable(f"Redis holds something that kcoord did not write: {error}") from error
        return found

    async def server_version(self) -> str:
        """As INFO gives it. Raises `LeaseUnavailable`."""
        info = await self._bounded(lambda: self._redis.info("server"))
        return str(info.get("redis_version", "unknown"))

    async def close(self) -> None:
        await self._news.close()
        try:
            await within(COMMAND_TIMEOUT, self._redis.aclose())
        except (RedisError, OSError, asyncio.TimeoutError):
            return  # the server is gone, and with it the connection

    async def _run(self, key: str, op: str, token: str, *args: str | int) -> Any:
        name = self._key(key)
        try:
            return await self._bounded(lambda: self._redis.evalsha(_SHA, 1, name, op, token, *args))
        except NoScriptError:
            return await self._bounded(lambda: self._redis.eval(_SCRIPT, 1, name, op, token, *args))

    async def _bounded(self, command: Callable[[], Awaitable[T]]) -> T:
        try:
            return await within(2 * COMMAND_TIMEOUT, self._in_turn(command))
        except NoScriptError:
            raise
        except asyncio.TimeoutError:
            raise LeaseUnavailable(f"Redis did not answer within {2 * COMMAND_TIMEOUT:g} s") from None
        except (RedisError, OSError, ValueError) as error:
            raise LeaseUnavailable(f"{type(error).__name__}: {error}") from error

    async def _in_turn(self, command: Callable[[], Awaitable[T]]) -> T:
        async with self._slots:
            return await twice(command, self._redis)


def _parse(reply: Any) -> Answer:
    try:
        kind, *rest = (part.decode() if isinstance(part, bytes) else part for part in reply)
        if None in rest:
            raise ValueError(f"{reply!r} lacks a field")
        if kind == "W":
            return Won(int(rest[0]))
        if kind == "R":
            return Ready(rest[0])
        if kind == "F":
            return Failed(rest[0], rest[1])
        if kind == "L":
            return Wait(rest[0], max(0, int(rest[1])) / 1000)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise LeaseUnavailable(f"Redis holds something that kcoord did not write: {error}") from error
    raise LeaseUnavailable(f"Redis holds something that kcoord did not write: {reply!r}")
