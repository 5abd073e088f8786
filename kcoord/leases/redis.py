"""Leases in Redis: one hash per key, one Lua script with an operation argument, news of all keys over one channel.

A claim is answered without a question if news have told that its key is ready, or led by another agent (`kcoord.leases.facts`).
An agent has one connection for commands and, while it asks, one for news. All keys of a namespace have one hash tag: one server
of a Redis Cluster has them (`kcoord.leases.redis_cluster`). The script reads the server's clock, so hosts need not agree on the
time; a repeated call with the same token gets the same answer, so a lost reply is harmless.

A timeline that shows why a lease has a token::

    agent A  acquire(a) → Lease            …partitioned…           ready(a): a fact, accepted
    agent B                    acquire(b) → Wait  …TTL…  → Lease   renew(b) → 1
    agent A                                                        renew(a) → 0: lost, A's compile goes on, harmless

If the server's clock is set forward, leases and outcomes end early; a holder takes its lease again at its next renewal, unless a
waiter came first, which costs one more compile. If it is set back, a claim shortens what it meets to one whole TTL, and a lease
never outlasts its limit by its holder's own clock. Fences do not grow over a clock that was set back *and* a key that was gone.
"""

from __future__ import annotations

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from redis.exceptions import NoPermissionError, NoScriptError, ResponseError

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Wait, Watch, Won, ended, within
from kcoord.leases.facts import Facts
from kcoord.leases.redis_client import (
    BROKEN,
    COMMAND_TIMEOUT,
    connect,
    is_of_another_master,
    repeated,
    why,
)
from kcoord.leases.redis_cluster import SlotOwner, SlotPipeline
from kcoord.leases.redis_news import News
from kcoord.leases.redis_script import NOT_OURS, SCRIPT, SHA, VERSION
from kcoord.redis_url import Nodes
from kcoord.telemetry.events import log, tell_bug

T = TypeVar("T")

_READY_TTL = 7 * 86400.0  # seconds; after it the store is looked at again, once
_LONGEST_LOG = 32 << 10  # characters
_LONGEST_WORD = 1 << 10


class RedisLeases(LeaseService):
    """Leases of one namespace in Redis; `tell` gets one line for people, once.

    Raises `SettingsError` if the URL has an option that there is not.
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
        tell: Callable[[str], object] = log.warning,
    ) -> None:
        super().__init__(limit)
        self._prefix, self._tell, self._told = f"kcoord:{{{namespace}}}", tell, False  # the braces make it a hash tag
        self._ttl_ms, self._failure_ms = max(1, int(ttl * 1000)), max(1, int(failure_ttl * 1000))
        self._redis, self._sentinels = connect(url)
        owner = SlotOwner(self._redis.connection_pool.make_connection, Nodes.of(url).addresses, self._prefix)
        self._owner, self._pipeline = owner, SlotPipeline(owner, broke=self._doubt, moved=lambda: self._news.doubt())
        self._facts = Facts(ttl)
        name = f"{self._prefix}:news:{VERSION}"
        self._news = News(name, self._facts, self._pipeline.ask, self._command, owner.connect, ttl)
        self._trial: asyncio.Task[None] | None = None

    def _key(self, key: str) -> str:
        return f"{self._prefix}:lease:{VERSION}:{key}"

    async def take(self, lease: Lease, void: str | None) -> Won | Ready | Failed | Wait:
        await self._tried_once()
        self._news.use()
        known = self._facts.known(lease.key, void)
        if known is not None and (lease.key, lease.token) not in self.held:
            return known
        limit_ms = int(self.limit * 1000)
        asked = lease.token, lease.holder, self._ttl_ms, limit_ms, void or ""
        answer = await self._question(lease.key, "acquire", *asked)
        if isinstance(answer, Won):
            self._news.led(lease.key, lease.holder)
        elif isinstance(answer, Ready):
            self._news.found(lease.key, answer.manifest)
        return answer

    async def look(self, key: str) -> Ready | Failed | Wait | None:
        answer = await self._question(key, "look", "")
        return None if isinstance(answer, Won) else answer

    async def _question(self, key: str, op: str, token: str, *args: str | int) -> Won | Ready | Failed | Wait:
        number = self._facts.number
        answer = _parse(await self._run(key, op, token, *args))
        self._facts.learn(key, answer, number)
        return answer

    async def renew(self, lease: Lease) -> bool:
        left_ms = int(lease.left() * 1000)
        return bool(await self._run(lease.key, "renew", lease.token, self._ttl_ms, lease.holder, left_ms))

    async def ready(self, key: str, manifest: str, lease: Lease | None = None) -> None:
        await self._run(key, "ready", "", manifest, int(_READY_TTL * 1000))
        self._news.ready(key, manifest)

    async def fail(self, lease: Lease, log: str, where: str) -> bool:
        failure = log[-_LONGEST_LOG:], where, self._failure_ms
        return await self._end(lease.key, "fail", lease.token, *failure)

    async def release(self, lease: Lease) -> bool:
        return await self._end(lease.key, "release", lease.token)

    async def _end(self, key: str, op: str, token: str, *args: str | int) -> bool:
        """Told whatever the answer: it is the second one's if the first was lost on its way."""
        was_ours = bool(await self._run(key, op, token, *args))
        self._news.changed(key)
        return was_ours

    async def _tried_once(self) -> None:
        """Try all commands before the first lease. A user who may not SUBSCRIBE would else be found out by the nodes that wait
        alone, and divide these from the others."""
        if self._trial is None:
            self._trial = asyncio.create_task(self.ping())
            self._trial.add_done_callback(self._tried)
        await asyncio.shield(self._trial)

    def _tried(self, trial: asyncio.Task[None]) -> None:
        """A trial that failed is followed by another, for the next lease. All that waited for this one may be cancelled."""
        if trial.cancelled() or (error := trial.exception()) is None:
            return
        self._trial = None
        if not isinstance(error, LeaseUnavailable):
            tell_bug(error, "Redis was not tried", self._tell)

    async def ping(self) -> None:
        """Take and release a lease, and follow the news anew.

        PING would say nothing: a replica, a full server, or one whose user may not write or subscribe, answers it.
        """
        key = f"ping-{uuid.uuid4().hex}"
        await self._news.verify()
        await self._news.publish(b"")
        await self._run(key, "acquire", key, key, self._ttl_ms, self._ttl_ms, "")
        await self._run(key, "release", key)

    def watch(self, key: str) -> Watch:
        return self._news.watch(key)

    async def server_version(self) -> str:
        """As INFO gives it, with the name if that is Valkey; "unknown" if the user may not ask. Raises `LeaseUnavailable`."""
        try:
            info = await self._command(lambda: self._pipeline.ask("INFO", "server"))
        except LeaseUnavailable as error:
            if isinstance(error.__cause__, NoPermissionError):
                return "unknown"
            raise
        said = info.decode(errors="replace") if isinstance(info, bytes) else ""
        if valkey := re.search(r"valkey_version:(\S+)", said):  # beside the version of Redis that it is compatible with
            return f"Valkey {valkey[1]}"
        found = re.search(r"redis_version:(\S+)", said)
        return found[1] if found else "unknown"

    async def close(self) -> None:
        if self._trial is not None:
            await ended({self._trial})
        await self._news.close()
        await self._pipeline.close()
        for client in (self._redis, *self._sentinels):
            try:
                await within(COMMAND_TIMEOUT, client.aclose())
            except BROKEN:
                continue  # the server is gone, and with it the connection

    async def _run(self, key: str, op: str, token: str, *args: str | int) -> Any:
        """Call the script, and once more if the key held something else, which is removed by then. Raises `LeaseUnavailable`."""
        name = self._key(key)

        async def call() -> Any:
            try:
                return await self._pipeline.ask("EVALSHA", SHA, 1, name, op, token, *args)
            except NoScriptError:
                return await self._pipeline.ask("EVAL", SCRIPT, 1, name, op, token, *args)

        try:
            return await self._command(call)
        except LeaseUnavailable as error:
            _, was_not_ours, found = str(error).partition(NOT_OURS)
            if not was_not_ours:
                raise
        if not self._told:
            self._told = True
            self._tell(f"Redis held {found.strip()} under {name}, which kcoord did not write; such keys are removed")
        try:
            return await self._command(call)
        except LeaseUnavailable as error:
            if NOT_OURS in str(error):
                raise LeaseUnavailable(f"somebody else writes to {name} in Redis: {error}") from error
            raise

    async def _command(self, command: Callable[[], Awaitable[T]]) -> T:
        """The result of `command`, repeated over broken connections. Raises `LeaseUnavailable`, within 4 s."""
        try:
            return await within(2 * COMMAND_TIMEOUT, repeated(command))
        except BROKEN as error:
            refused = isinstance(error, ResponseError) and not is_of_another_master(error)
            if not refused:  # else the server is well, and what it said before is true
                self._doubt()
            if isinstance(error, asyncio.TimeoutError):
                raise LeaseUnavailable(f"Redis did not answer within {2 * COMMAND_TIMEOUT:g} s") from None
            raise LeaseUnavailable(why(error)) from error

    def _doubt(self) -> None:
        """Forget what is known: it may be of a server that is gone."""
        self._owner.doubt()
        self._news.doubt()


def _parse(reply: Any) -> Won | Ready | Failed | Wait:
    try:
        kind, *rest = (part.decode(errors="replace") if isinstance(part, bytes) else part for part in reply)
        if None in rest:
            raise ValueError(f"{reply!r} lacks a field")
        if kind == "W":
            return Won(int(rest[0]))
        if kind == "R":
            return Ready(rest[0])
        if kind == "F":  # cut, since no frame to a rank would hold more
            return Failed(rest[0][-_LONGEST_LOG:], rest[1][:_LONGEST_WORD])
        if kind == "L":
            return Wait(rest[0][:_LONGEST_WORD], max(0, int(rest[1])) / 1000)
    except (TypeError, ValueError, IndexError, AttributeError) as error:
        raise LeaseUnavailable(f"Redis holds something that kcoord did not write: {error}") from error
    raise LeaseUnavailable(f"Redis holds something that kcoord did not write: {reply!r}")
