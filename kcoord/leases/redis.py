"""Leases in Redis: one hash per key, one Lua script with an operation argument, Pub/Sub to wake.

The script touches one key, so it runs on Redis Cluster; it reads the server's clock, so hosts need not agree on the
time; a repeated call with the same token gets the same answer, so a lost reply is harmless.

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
import hashlib
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from redis.exceptions import NoPermissionError, NoScriptError, RedisError, ResponseError

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Answer, Failed, LeaseService, Ready, Wait, Watch, Won, ended, monotonic, within
from kcoord.leases.redis_client import COMMAND_TIMEOUT, CONNECTIONS, NONSENSE, connect, repeated, why
from kcoord.leases.redis_news import News, Subscription
from kcoord.telemetry.events import log

T = TypeVar("T")

_READY_TTL = 7 * 86400.0  # seconds; after it the store is looked at again, once
_LONGEST_LOG = 32 << 10  # characters
_LONGEST_WORD = 1 << 10
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
# that the hard limit removed is gone as well: so the holder says how much of its limit is left. What is no hash of ours is
# deleted, and the error KCOORD-FOREIGN says what it was: then the key is free, and whoever called asks again.
_FOREIGN = "KCOORD-FOREIGN"
_SCRIPT = """
local key, op, token = KEYS[1], ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function foreign()
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' then return nil end
  if kind ~= 'hash' then return 'a ' .. kind end
  local names = {'state', 'token', 'holder', 'fence', 'limit', 'ttl', 'manifest', 'log', 'where'}
  local values, has = redis.call('HMGET', key, unpack(names)), {}
  for n, name in ipairs(names) do has[name] = values[n] end
  local function number(name)
    local text = has[name]
    return text and #text <= 16 and string.find(text, '^%d+$') and tonumber(text) < 9e15  -- a double holds it and its successor
  end
  if redis.call('PTTL', key) < 0 then return 'a hash that never expires' end
  if not (number('fence') and number('ttl')) then return 'a hash without a number that it needs' end
  if has.state == 'L' then
    if has.token and has.holder and number('limit') then return nil end
  elseif has.state == 'R' then
    -- it comes back as the void of the next claim: so nothing that changes when it is decoded
    if has.manifest and string.find(has.manifest, '^[%w._-]+$') and #has.manifest <= 256 then return nil end
  elseif has.state == 'F' then
    if has.log and has.where then return nil end
  end
  return 'a hash in no state that there is'
end
local found = foreign()
if found then
  redis.call('DEL', key)
  return redis.error_reply('KCOORD-FOREIGN ' .. found)
end

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
  local said = redis.call('HMGET', key, 'manifest', 'log', 'where', 'holder')  -- before it may end, in mid-script
  -- a server's clock that was set back would keep what is to end for as much longer
  if redis.call('PTTL', key) > (tonumber(held[5]) or math.huge) then redis.call('PEXPIRE', key, held[5]) end
  if state == 'R' then
    if said[1] and said[1] ~= void then return {'R', said[1]} end
  elseif state == 'F' then
    if said[2] and said[3] then return {'F', said[2], said[3]} end
  elseif state == 'L' and owner == token then
    return {'W', held[3]}
  elseif state == 'L' then
    local left_ms = redis.call('PTTL', key)
    -- 0: on a replica, where nothing expires, this is one that ended
    if left_ms > 0 and said[4] then return {'L', said[4], left_ms} end
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
            self._tell(f"an error in the agent, please report it: {type(error).__name__}: {error}")
            log.error("Redis was not tried", exc_info=error)

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

        PING is no question: a replica, a full server, or one whose user may not write or subscribe, answers it.
        """
        key = f"ping-{uuid.uuid4().hex}"
        async with self.watch(key):
            await self._run(key, "acquire", key, key, self._ttl_ms, self._limit_ms, "")
            await self._run(key, "release", key)

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
            what = str(error).partition(_FOREIGN)[2].strip()
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
        except (RedisError, OSError, *NONSENSE) as error:
            if isinstance(error, ResponseError) and _FOREIGN in str(error):
                raise
            if "READONLY" in str(error):  # there is another master now, and perhaps its address where ours came from
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
