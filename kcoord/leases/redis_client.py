"""From ``KCOORD_REDIS_URL`` to redis-py's clients. All timeouts and retries are stated: its defaults differ between releases.

TCP's own would keep a connection to a host that vanished for two hours if nothing is sent on it, and for a quarter of an hour if
something is.
"""

from __future__ import annotations

import platform
import re
import socket
import ssl
import zlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio as aioredis
from redis.asyncio.client import PubSub
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel
from redis.backoff import ExponentialBackoff, NoBackoff
from redis.exceptions import (
    AskError,
    ClusterError,
    MovedError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from kcoord.errors import SettingsError
from kcoord.redis_url import Nodes, Sentinels, without_password

T = TypeVar("T")
Client = Any  # `aioredis.Redis` or `RedisCluster`

_CONNECT_TIMEOUT = 2.0  # seconds
_SENTINEL_TIMEOUT = 1.0  # seconds; if a sentinel is gone, the next is asked within the same command
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 15,  # seconds
    socket.TCP_KEEPINTVL: 5,  # seconds
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 10_000,  # milliseconds that what was sent may stay unacknowledged
}
NONSENSE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors of redis-py, beside its own, for a reply that no Redis sends, and for a connection that it loses in mid-command."""
BROKEN = (RedisError, RedisClusterException, OSError, *NONSENSE)
"""All that may come of a connection's use."""
_CAUSES = {
    "Authentication required|NOAUTH|without any password": "it wants a password: write redis://:PASSWORD@host:port in {url}",
    "invalid username-password|WRONGPASS|invalid password": "wrong user or password in {url}",
    "no permissions|NOPERM": "{error}; add it to the ACL of the user in {url}",
    "DB index is out of range": "it has no such database: write /0 at the end of {url}",
    "[Hh]ostname mismatch|IP address mismatch|doesn't match": "its certificate is for another host name than that in {url}",
    "CERTIFICATE_VERIFY_FAILED": "no authority that is known here signed its certificate: name it by ?ssl_ca_certs=FILE in {url}",
    "WRONG_VERSION_NUMBER|Timeout connecting to server over TLS": "it does not speak TLS: write redis:// in {url}",
    "Connection (closed by server|reset by peer|lost).* before it answered": (
        "it closes connections: if it speaks TLS, write rediss:// in {url}"
    ),
    "Name or service not known|No address associated|failure in name resolution": "there is no such host: check {url}",
    "Error 111|Connection refused": "nothing listens there: start Redis, or check {url}",
}
"""Patterns in errors of redis-py, and their causes for people. `{url}` is the setting, `{error}` the server's words."""
_SEVERAL = "it is a node of a Redis Cluster: let this user ask CLUSTER SLOTS and COMMAND (+cluster|slots +command)"


class Connections:
    """Clients of the server at `url`, which answers within `silence` seconds. Nothing is sent before the first command.

    `setting` is the variable that names the URL, for people.

    A server that knows CLUSTER SLOTS, or answers MOVED, is one of a Redis Cluster, which redis-py's cluster client is for. Raises
    `SettingsError` if redis-py refuses an option of the URL.
    """

    def __init__(self, url: str, silence: float, setting: str = "KCOORD_REDIS_URL") -> None:
        self._setting = setting
        self._place = without_password(url).partition("://")[2].rpartition("@")[2]
        self._silence, self._answered = silence, False  # whether a command ever had a result
        self._shared: dict[str, Any] = {
            "socket_timeout": silence,
            "socket_connect_timeout": _CONNECT_TIMEOUT,
            "socket_keepalive": True,
            "socket_keepalive_options": _KEEPALIVE,
            "health_check_interval": 0,
            "encoding_errors": "replace",
            "decode_responses": False,
            "protocol": 2,
        }
        never = Retry(
            NoBackoff(), 0, ()
        )  # else a subscription that breaks is made again, and nothing says what was missed
        self._plain = {**self._shared, "retry": never, "retry_on_error": []}
        self._nodes = Nodes.of(url)
        self._sentinels: list[aioredis.Redis] = []
        self._cluster: RedisCluster | None = None
        self._asked = not self._nodes.addresses  # whether it is one of a cluster
        try:
            self._client = self._made(url)
        except (TypeError, ValueError, RedisError) as error:
            unknown = re.search(r"unexpected keyword argument '?(\w+)", str(error))
            reason = f"there is no {unknown[1]}" if unknown else error
            raise SettingsError(f"{setting} has an option that redis-py refuses: {reason}") from None
        if len(self._nodes.addresses) > 1:
            self._join_cluster()

    async def run(self, command: Callable[[Client], Awaitable[T]]) -> T:
        """The result of `command`. A connection that a restart broke says nothing about the server: it is tried once more."""
        for attempt in (1, 2, 3):
            try:
                result = await command(await self._server())
                self._answered = True
                return result
            except (MovedError, AskError):
                if self._cluster is not None:
                    raise
                self._join_cluster()
            except (RedisConnectionError, AttributeError):
                if attempt > 1:
                    raise
        raise AssertionError("unreachable")

    async def subscribed(self, channel: str) -> PubSub:
        """A new connection that hears `channel`. In a cluster, whose nodes pass all messages on, a hash of this host's name says
        which master it leads to: redis-py's own choice would put all agents on one.
        """
        clients, broken = [self._client], None
        if await self._server() is self._cluster is not None:
            await self._cluster.initialize()
            masters = sorted(self._cluster.get_primaries(), key=lambda node: node.name)
            first = zlib.crc32(platform.node().encode()) % len(masters)
            clients = [self._of_node(node) for node in (*masters[first:], *masters[:first])]
        for client in clients:
            pubsub = client.pubsub()
            try:
                await pubsub.subscribe(channel)
                confirmed = await pubsub.get_message(timeout=self._shared["socket_timeout"])
                if confirmed is None or (confirmed["type"], confirmed["channel"]) != ("subscribe", channel.encode()):
                    raise RedisError(f"Redis confirmed no subscription, but said {confirmed!r}")
                return pubsub
            except BROKEN as error:
                broken = error
                await closed(pubsub)
            except BaseException:
                await closed(pubsub)
                raise
        assert broken is not None  # there is a client
        raise broken

    async def _server(self) -> Client:
        if not self._asked:
            try:
                await self._client.execute_command("CLUSTER SLOTS")  # type: ignore[no-untyped-call]
            except ResponseError:  # it is a single one, or this user may not ask
                pass
            else:
                self._join_cluster()
                await self._client.connection_pool.disconnect()
            self._asked = True
        return self._cluster or self._client

    def why(self, error: BaseException) -> str:
        """One line for people, with the server's address; the same line for the same cause, so that it is told once."""
        text, cause = str(error), error.__cause__ or error.__context__
        if isinstance(error, TimeoutError) and not text:
            return f"{self._place}: no answer in {self._silence:g} s"
        if isinstance(
            error, AttributeError
        ):  # redis-py drops a lost connection's streams while somebody writes to them
            return f"{self._place}: Connection closed in mid-command"
        if isinstance(error, (MovedError, AskError, ClusterError)) or "Redis Cluster cannot be connected" in text:
            text = f"{text or type(error).__name__} ({_SEVERAL})"
        if isinstance(error, MasterNotFoundError):
            text = text.partition(" : ")[0]  # the rest are redis-py's objects, with their addresses in memory
        elif isinstance(error, ReadOnlyError) or "@user_script" in text:  # the place in the script
            text = re.sub(r"^.*@user_script: ?\d+: -?| script: .*$", "", text)
        elif isinstance(cause, OSError) and (cause.strerror or str(cause)) not in text:
            text = f"{text} {cause}"
        whole = text + " over TLS" * bool(self._shared.get("ssl")) + " before it answered" * (not self._answered)
        known = next((line for pattern, line in _CAUSES.items() if re.search(pattern, whole)), "")
        said = known.format(url=self._setting, error=text) if known else f"{type(error).__name__}: {text}"
        return f"{self._place}: {' '.join(said.split())}"

    async def drop(self) -> None:
        """End all connections: the next command makes new ones, perhaps to another server."""
        for client in (self._client, *self._sentinels):
            await client.connection_pool.disconnect()
        if self._cluster is not None:
            await closed(self._cluster)

    async def close(self) -> None:
        for client in (self._cluster, self._client, *self._sentinels):
            await closed(client)

    def _made(self, url: str) -> aioredis.Redis:
        """A client for the server, or for the master that sentinels name."""
        sentinels = Sentinels.of(url)
        stated = dict(parse_url(self._nodes.first if sentinels is None else sentinels.options))
        explicit = dict(self._plain)
        if is_tls := stated.get("connection_class") is SSLConnection:
            certificate = stated.get("ssl_cert_reqs", "required")
            explicit["ssl_cert_reqs"] = certificate
            explicit["ssl_check_hostname"] = certificate != "none" and stated.get("ssl_check_hostname", True)
            explicit["ssl_min_version"] = ssl.TLSVersion.TLSv1_2
        if "path" in stated:  # a Unix socket
            del explicit["socket_keepalive"], explicit["socket_keepalive_options"]
        if sentinels is None:
            pool = aioredis.ConnectionPool(**{**stated, **explicit})
            pool.make_connection()  # type: ignore[no-untyped-call]  # it refuses unknown options
            words = ("username", "password")
            secured = {name: value for name, value in {**stated, **explicit}.items() if name.startswith("ssl")}
            self._shared |= {name: stated[name] for name in words if name in stated} | secured | {"ssl": is_tls}
            return aioredis.Redis.from_pool(pool)
        del stated["host"]
        if stated.pop("connection_class", None) is not None:
            stated["ssl"] = True
        its = {**{n: v for n, v in stated.items() if n.startswith("ssl")}, **explicit}
        its |= {"socket_timeout": _SENTINEL_TIMEOUT, "socket_connect_timeout": _SENTINEL_TIMEOUT}
        its |= {"username": sentinels.username, "password": sentinels.password}
        known = Sentinel(list(sentinels.addresses), sentinel_kwargs=its)  # type: ignore[no-untyped-call]
        client: aioredis.Redis = known.master_for(sentinels.service, **{**stated, **explicit})
        self._sentinels = list(known.sentinels)
        for each in (client, *self._sentinels):
            each.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        return client

    def _join_cluster(self) -> None:
        """A third of the silence for each node: one that hangs leaves time to ask the others."""
        self._asked = True
        shared = {**self._shared, "socket_timeout": self._shared["socket_timeout"] / 3}
        self._cluster = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in self._nodes.addresses],
            require_full_coverage=False, max_connections=1, retry=Retry(ExponentialBackoff(cap=1.0, base=0.05), 6),
            retry_on_error=[], **shared,
        )  # fmt: skip

    def _of_node(self, node: ClusterNode) -> aioredis.Redis:
        return aioredis.Redis(host=node.host, port=int(node.port), **{**self._plain, **self._shared})


async def closed(client: Any) -> None:
    """Close a client or a subscription whose server may be gone."""
    if client is not None:
        try:
            await client.aclose()
        except BROKEN:
            return
