"""Leases in Redis: one value for each key, three scripts, and news of all keys of a namespace over one channel.

A key's value is ``L token⏎TTL⏎holder`` while it is leased, ``R manifest`` once it is READY, ``F TTL⏎where⏎log`` for a while after
it failed, or nothing. `PEXPIRE` bounds all three; a lease's hard limit is counted by its holder's own clock. A lease is named by
its value, so a repeated command gets the same answer, and a lost reply is harmless. `ready` needs no lease: it is a fact.

A timeline that shows why a lease has a token, and why a waiter subscribes before it asks::

    agent A  acquire → LEADER       …partitioned…                 ready(m) → value R m, news
    agent B  subscribe, acquire → WAIT   …TTL…  acquire → LEADER  renew → 0: lost, B's compile goes on, harmless
    agent C  subscribe,                         acquire → WAIT    hears R m: fetches m, asks nothing

The news of a READY holds its manifest, which an agent remembers: it does not ask for that key, unless the manifest proved void.
News that is lost delays a waiter by one re-check (`kcoord.leases.base.RECHECK`).

One message to 1,250 nodes costs the server 10 ms. So messages keep a distance of 60 µs for each receiver: facts that come sooner
go together in the next one. Between two nodes nothing waits.

If the server's clock is set forward, leases and outcomes end early; a holder takes its lease again at its next renewal, unless a
waiter came first. If it is set back, `acquire` cuts what is left to the one TTL that the value names.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from redis.exceptions import NoScriptError

from kcoord.errors import LeaseUnavailable
from kcoord.latest import Latest
from kcoord.leases.base import Answer, EventWatch, Failed, Lease, LeaseService, Ready, Unleased, Wait, Watch, within
from kcoord.leases.redis_client import BROKEN, Client, Connections, closed
from kcoord.telemetry.events import tell_if_failed

T = TypeVar("T")

VERSION = "3"
"""Part of every key's name. Raise it if a value changes: versions that run side by side never meet each other's."""
SILENCE = 10.0  # seconds without any answer; a slow server is not lost
DISTANCE = 60.0  # µs between two messages, for each receiver
_READY_TTL = 7 * 86400.0  # seconds; after it the store is looked at again, once
_LONGEST_LOG = 32 << 10  # characters
_LONGEST_WORD = 1 << 10
_REMEMBERED = 20_000  # keys that are READY
_MANIFEST = re.compile(r"[\w.-]{1,256}", re.ASCII)
_LONGEST_MESSAGE = 1 << 20  # bytes
_MOST_AT_ONCE = 100  # facts of one call


class Script:
    """The server knows a script by its SHA-1, until it is restarted."""

    def __init__(self, text: str) -> None:
        self.text, self.sha = text, hashlib.sha1(text.encode()).hexdigest()

    async def __call__(self, client: Client, keys: list[str], *args: str | int) -> Any:
        try:
            return await client.evalsha(self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await client.eval(self.text, len(keys), *keys, *args)


# Takes a lease, or says why not. A value of another type, or that kcoord did not write, is as good as none.
# KEYS[1]  the key
# ARGV     the lease's value, its TTL in ms, the void manifest or ''
# → {'LEADER'} | {'READY', manifest} | {'FAILED', where, log} | {'WAIT', holder, ms left}
# The first PEXPIRE is for a server that is out of memory: it refuses a script's SET, unless the script has written before.
ACQUIRE = Script("""
local key, lease, void = KEYS[1], ARGV[1], ARGV[3]
local value = redis.pcall('GET', key)
if type(value) == 'table' then redis.call('DEL', key) value = false end
if redis.call('PTTL', key) == 0 then value = false end  -- it has ended, and a replica's scripts see it still

local function left(ttl)  -- longer than that: the server's clock was set back, or somebody else wrote it
  local ms, most = redis.call('PTTL', key), math.min(tonumber(ttl), 86400000)
  if ms >= 0 and ms <= most then return ms end
  redis.call('PEXPIRE', key, most)
  return most
end

if value and value ~= lease then
  local manifest = #value <= 257 and string.match(value, '^R([%w._-]+)$')
  if manifest and manifest ~= void then return {'READY', manifest} end
  local kept, where, log = string.match(value, '^F(%d+)\\n([^\\n]*)\\n(.*)$')
  if kept then left(kept) return {'FAILED', where, log} end
  local ttl, holder = string.match(value, '^L[^\\n]*\\n(%d+)\\n(.*)$')
  if ttl then return {'WAIT', holder, left(ttl)} end
end
redis.call('PEXPIRE', key, ARGV[2])
redis.call('SET', key, lease, 'PX', ARGV[2])
return {'LEADER'}
""")

# Holds on for another TTL. A key without a value is taken again: its holder is alive, and nobody else has it.
# KEYS[1]  the key
# ARGV     the lease's value, the ms until it ends
# → 1, or 0 if the key has another value
RENEW = Script("""
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'string' and value ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
""")

# Ends a lease: READY, FAILED or released.
# KEYS[1]  the key
# ARGV     the lease's value, or '' for READY, which needs none; the new value, or '' for none; its TTL in ms
# → 1, or 0 if the key has another value than the lease's
END = Script("""
if ARGV[1] ~= '' and redis.pcall('GET', KEYS[1]) ~= ARGV[1] then return 0 end
if ARGV[2] == '' then return redis.call('DEL', KEYS[1]) end
redis.call('PEXPIRE', KEYS[1], ARGV[3])
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
""")

# Publishes facts, at a distance from the message before: those that come too early wait for the next call.
# KEYS[1]  the facts that wait
# KEYS[2]  the receivers of the last message; it lives 10 min longer than the distance
# ARGV     the channel, the distance in µs for each receiver, facts
# → the ms after which to call again; 0: nothing waits
TELL = Script("""
if redis.pcall('LTRIM', KEYS[1], -10000, -1).err then redis.call('DEL', KEYS[1]) end
for n = 3, #ARGV do redis.call('RPUSH', KEYS[1], ARGV[n]) end
redis.call('PEXPIRE', KEYS[1], 60000)
local facts = redis.call('LRANGE', KEYS[1], 0, 199)
if #facts == 0 then return 0 end
local early = redis.call('PTTL', KEYS[2]) - 600000
if early > 0 and early <= 1000 then return early end
local before = redis.pcall('GET', KEYS[2])
redis.call('LTRIM', KEYS[1], 200, -1)
local receivers = redis.call('PUBLISH', ARGV[1], (tonumber(before) or 0) .. '\\n' .. table.concat(facts, '\\n'))
redis.call('SET', KEYS[2], receivers, 'PX', 600000 + math.min(math.floor(receivers * ARGV[2] / 1000), 1000))
return math.min(redis.call('LLEN', KEYS[1]), 1)
""")


class RedisLeases(LeaseService):
    """Leases of one namespace in Redis, over two connections: one for commands, and one for news.

    A server that answers nothing for `silence` seconds is lost; then, and if it refuses or breaks a connection, or refuses a
    command, all connections are dropped, and whoever waits asks again. `distance`: of messages, in µs for each receiver.
    `setting`: the variable that names the URL. Raises `SettingsError` if the URL has an option that there is not.
    """

    name = "Redis"

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        ttl: float,
        limit: float,
        failure_ttl: float,
        silence: float | None = None,
        distance: float | None = None,
        setting: str = "KCOORD_REDIS_URL",
    ) -> None:
        self._namespace, self._limit = namespace, limit
        self._silence, self._distance = silence or SILENCE, round(distance or DISTANCE)
        self._ttl_ms, self._failure_ms = max(1, int(min(ttl, limit) * 1000)), max(1, int(failure_ttl * 1000))
        self._connections = Connections(url, self._silence, setting)
        self._turn = asyncio.Semaphore(1)  # in front of the connection for commands
        self._dropped, self._why = 0, ""  # how often all connections were dropped, and the last reason
        self._ready: Latest[str, str] = Latest(_REMEMBERED)  # key → manifest
        self._watchers: dict[str, set[asyncio.Event]] = {}
        self._channel = f"kcoord:{namespace}:news:{VERSION}"
        self._listener: asyncio.Task[None] | None = None
        self._listening: asyncio.Future[None] | None = None  # done once the server has confirmed the subscription
        self._leaving = False  # the listener is cancelled, and may still close its connection
        self._facts: list[str] = []  # to be told
        self._teller: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    # The seven members.

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        known = self._ready.get(key)
        if known is not None and known != void:
            return Ready(known)
        self._ready.pop(key, None)
        lease = Lease(self, key, token, holder, self._limit)
        try:
            reply = await self._run(ACQUIRE, key, self._value(lease), self._ttl_ms, void or "")
        except asyncio.CancelledError:
            self._spawn(self.release(lease))  # the server carries out what was sent
            raise
        answer = _answer(reply, lease)
        if isinstance(answer, Ready):
            self._ready[key] = answer.manifest
        return answer

    async def renew(self, lease: Lease) -> bool:
        left_ms = int(lease.left() * 1000)
        return left_ms > 0 and bool(await self._run(RENEW, lease.key, self._value(lease), min(self._ttl_ms, left_ms)))

    async def ready(self, key: str, manifest: str) -> None:
        if (reply := await self._run(END, key, "", f"R{manifest}", int(_READY_TTL * 1000))) != 1:
            raise LeaseUnavailable(f"Redis says something that no script of kcoord does: {reply!r}"[:200])
        self._ready[key] = manifest
        self._changed(key, f"R {manifest} {key}")

    async def fail(self, lease: Lease, log: str, where: str) -> bool:
        failure = f"F{self._failure_ms}\n{' '.join(where.splitlines())}\n{log[-_LONGEST_LOG:]}"
        ended = await self._run(END, lease.key, self._value(lease), failure, self._failure_ms)
        self._changed(lease.key, f"C {lease.key}")  # whatever the answer: it is the second one's if the first was lost
        return bool(ended)

    async def release(self, lease: Lease) -> bool:
        ended = await self._run(END, lease.key, self._value(lease), "", 0)
        self._changed(lease.key, f"C {lease.key}")
        return bool(ended)

    def watch(self, key: str) -> Watch:
        return EventWatch(self._watchers, key, self._follow)

    async def close(self) -> None:
        """Tell what is to be told, within 2 s."""
        if self._teller is not None or self._tasks:
            await asyncio.wait({*self._tasks, *([self._teller] if self._teller else [])}, timeout=2.0)
        for task in (self._listener, self._teller, *self._tasks):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._connections.close()

    # Commands, one after the other.

    async def _run(self, script: Script, key: str, *args: str | int) -> Any:
        return await self._command(lambda client: script(client, [self._key(key)], *args))

    def _key(self, key: str) -> str:
        return f"kcoord:{self._namespace}:lease:{VERSION}:{key}"

    def _value(self, lease: Lease) -> str:
        return f"L{lease.token}\n{self._ttl_ms}\n{lease.holder}"

    async def _command(self, command: Callable[[Client], Awaitable[T]]) -> T:
        """The result of `command`, which goes on if its caller is cancelled. Raises `LeaseUnavailable`."""
        return await asyncio.shield(self._spawn(self._carried_out(command)))

    async def _carried_out(self, command: Callable[[Client], Awaitable[T]]) -> T:
        dropped = self._dropped
        async with self._turn:
            if dropped != self._dropped:  # it fell silent, or was lost, before our turn came
                raise LeaseUnavailable(self._why)
            try:
                return await within(self._silence, self._connections.run(command))
            except BROKEN as error:
                self._why = self._connections.why(error)
                await self._drop()
                raise LeaseUnavailable(self._why) from error

    async def _drop(self) -> None:
        """The server may be gone, or be another one."""
        self._dropped += 1
        if self._listener is not None:
            self._leaving = self._listener.cancel()
        try:
            await self._connections.drop()
        except BROKEN:
            return  # the connection had ended

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, though nobody waits
        return task

    # News.

    def _changed(self, key: str, fact: str) -> None:
        """Wake who waits here, and tell the others."""
        self._wake(key)
        self._facts.append(fact)
        if self._teller is None or self._teller.done():
            self._teller = asyncio.create_task(self._tell())
            self._teller.add_done_callback(lambda task: tell_if_failed(task, "other nodes are not told of keys"))

    async def _tell(self) -> None:
        """Publish all facts. Those that the server does not take are lost: who waits for them asks within seconds."""
        tagged, again = f"kcoord:{self._namespace}:{{{self._namespace}}}", 0  # both in one slot
        keys = [f"{tagged}:facts", f"{tagged}:receivers"]
        try:
            while self._facts or again:
                await asyncio.sleep(again / 1000)
                facts, self._facts = self._facts[:_MOST_AT_ONCE], self._facts[_MOST_AT_ONCE:]
                again = await self._tell_some(keys, facts)
        except LeaseUnavailable:
            self._facts.clear()

    async def _tell_some(self, keys: list[str], facts: list[str]) -> int:
        reply = await self._command(lambda client: TELL(client, keys, self._channel, self._distance, *facts))
        return min(max(reply, 0), 1000) if isinstance(reply, int) else 0

    async def _follow(self) -> None:
        """Return once every change is heard. Raises `LeaseUnavailable`."""
        if self._listener is None or self._listener.done() or self._leaving:
            self._leaving, self._listening = False, asyncio.get_running_loop().create_future()
            self._listener = asyncio.create_task(self._listen(self._listening))
            self._listener.add_done_callback(lambda task: tell_if_failed(task, "news of other nodes is not heard"))
        assert self._listening is not None
        await asyncio.shield(self._listening)

    async def _listen(self, confirmed: asyncio.Future[None]) -> None:
        """Hear the news until the connection breaks. Whoever waits then asks again, which begins another."""
        pubsub, error = None, LeaseUnavailable("Connection closed")
        try:
            pubsub = await within(self._silence, self._connections.subscribed(self._channel))
            confirmed.set_result(None)
            while True:
                message = await pubsub.get_message(ignore_subscribe_messages=True, timeout=60.0)
                if message is not None:
                    self._hear(message["data"])
        except BROKEN as broken:
            error = LeaseUnavailable(self._connections.why(broken))
        finally:
            if not confirmed.done():
                confirmed.set_exception(error)
                confirmed.exception()  # seen, though nobody waits
            for key in list(self._watchers):
                self._wake(key)
            await closed(pubsub)

    def _hear(self, message: bytes) -> None:
        """Others may write to the channel: what is no fact is left out."""
        receivers, *facts = message[:_LONGEST_MESSAGE].decode(errors="replace").split("\n")
        self.nodes = int(receivers[:6]) if receivers.isdecimal() else self.nodes
        for fact in facts:
            kind, _, key = fact.partition(" ")
            if kind == "R":
                manifest, _, key = key.partition(" ")
                if not (_MANIFEST.fullmatch(manifest) and 0 < len(key) <= _LONGEST_WORD):
                    continue
                self._ready[key] = manifest
            self._wake(key)

    def _wake(self, key: str) -> None:
        for event in self._watchers.get(key, ()):
            event.set()


def _answer(reply: Any, lease: Lease) -> Answer:
    """`Unleased` for a reply that no script of ours gives: it is about this key alone."""
    if not isinstance(reply, list):
        return Unleased()
    match [part.decode(errors="replace") if isinstance(part, bytes) else part for part in reply]:
        case ["LEADER"]:
            return lease
        case ["READY", str(manifest)]:
            return Ready(manifest)
        case ["FAILED", str(where), str(log)]:  # cut, since no frame to a rank would hold more
            return Failed(log[-_LONGEST_LOG:], where[:_LONGEST_WORD])
        case ["WAIT", str(holder), int(ms)]:
            return Wait(holder[:_LONGEST_WORD], max(0, ms) / 1000)
    return Unleased()
