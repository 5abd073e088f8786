"""From ``KCOORD_REDIS_URL`` to a client whose every wait has an end.

redis-py's defaults run from waiting for ever (5) to retrying for a minute (8): all of them are stated here. TCP's own would
keep a connection to a host that vanished for two hours if nothing is sent on it, and for a quarter of an hour if something is.
"""

from __future__ import annotations

import asyncio
import random
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import redis.asyncio as aioredis
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import MasterNotFoundError, Sentinel, SentinelManagedSSLConnection
from redis.backoff import NoBackoff
from redis.exceptions import AskError, ClusterDownError, MovedError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from kcoord.errors import SettingsError
from kcoord.redis_url import Nodes, Sentinels

T = TypeVar("T")

COMMAND_TIMEOUT = 2.0  # seconds for one command, its connection included
_SENTINEL_TIMEOUT = 1.0  # seconds; if a sentinel is gone, the next is asked within the same command
_KEEPALIVE = {
    socket.TCP_KEEPIDLE: 15,  # seconds
    socket.TCP_KEEPINTVL: 5,  # seconds
    socket.TCP_KEEPCNT: 3,
    socket.TCP_USER_TIMEOUT: 10_000,  # milliseconds that what was sent may stay unacknowledged
}
NONSENSE = (ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors of redis-py, beside its own, for a reply that no Redis sends."""
BROKEN = (RedisError, OSError, asyncio.TimeoutError, *NONSENSE)
"""All that may come of a connection's use."""
_TRIES = 6
_ONE_OF_SEVERAL = (
    "it is a node of a Redis Cluster, and another one has the keys: "
    "name nodes by host and port, and let this user ask CLUSTER SLOTS (+cluster|slots)"
)
_HUNG_UP = ("max number of clients", "Connection lost", "closed by server", "reset by peer", "Broken pipe")


class _Secured:
    """A connection of TLS 1.2 at least. redis-py 5 has no such option."""

    def _connection_arguments(self) -> Any:
        arguments = super()._connection_arguments()  # type: ignore[misc]
        if (context := arguments["ssl"]).minimum_version < ssl.TLSVersion.TLSv1_2:
            context.minimum_version = ssl.TLSVersion.TLSv1_2
        return arguments


class _SecuredConnection(_Secured, SSLConnection):
    """To a server that the URL names, or to a sentinel."""


class _SecuredManagedConnection(_Secured, SentinelManagedSSLConnection):
    """To the master that a sentinel names."""


_SECURED = {SSLConnection: _SecuredConnection, SentinelManagedSSLConnection: _SecuredManagedConnection}


def connect(url: str) -> tuple[aioredis.Redis, list[aioredis.Redis]]:
    """A client for the master, and clients of the sentinels that know which one that is, if there are any.

    Nothing is sent yet. Raises `SettingsError` if redis-py refuses an option of the URL.
    """
    try:
        return _connect(url)
    except (TypeError, ValueError, RedisError) as error:
        unknown = re.search(r"unexpected keyword argument '?(\w+)", str(error))
        reason = f"there is no {unknown[1]}" if unknown else error
        raise SettingsError(f"KCOORD_REDIS_URL has an option that redis-py refuses: {reason}") from None


def _connect(url: str) -> tuple[aioredis.Redis, list[aioredis.Redis]]:
    sentinels = Sentinels.of(url)
    url = Nodes.of(url).first
    options: dict[str, Any] = {
        "socket_timeout": COMMAND_TIMEOUT,
        "socket_connect_timeout": COMMAND_TIMEOUT,
        "socket_keepalive": True,
        "socket_keepalive_options": _KEEPALIVE,
        "health_check_interval": 0,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "encoding_errors": "replace",
        "decode_responses": False,
        "protocol": 2,
        **_tls(parse_url(url if sentinels is None else sentinels.options)),
    }
    if url.startswith("unix:"):
        del options["socket_keepalive"], options["socket_keepalive_options"]
    if sentinels is None:
        client = aioredis.Redis.from_url(url, **options)
        clients: list[aioredis.Redis] = []
    else:
        client, clients = _through(sentinels, options)
    pool = client.connection_pool
    pool.connection_kwargs.update(options)  # an option in the URL wins otherwise, also one that waits for ever
    for each in (client, *clients):
        its = each.connection_pool
        its.connection_class = _SECURED.get(its.connection_class, its.connection_class)
        its.make_connection()  # type: ignore[no-untyped-call]
    return client, clients


def _tls(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Checks of a server's certificate, which options in the URL turn off. By itself redis-py 5 checks no host name."""
    if stated.get("connection_class") is not SSLConnection:
        return {}
    certificate = stated.get("ssl_cert_reqs", "required")
    return {
        "ssl_cert_reqs": certificate,
        "ssl_check_hostname": certificate != "none" and stated.get("ssl_check_hostname", True),
    }


def _through(sentinels: Sentinels, options: dict[str, Any]) -> tuple[aioredis.Redis, list[aioredis.Redis]]:
    stated = dict(parse_url(sentinels.options))
    del stated["host"]
    if stated.pop("connection_class", None) is not None:
        stated["ssl"] = True
    shared = {name: value for name, value in stated.items() if name.startswith("ssl")}
    patience = {"socket_timeout": _SENTINEL_TIMEOUT, "socket_connect_timeout": _SENTINEL_TIMEOUT}
    asked = {**shared, **options, **patience, "username": sentinels.username, "password": sentinels.password}
    known = Sentinel(list(sentinels.addresses), sentinel_kwargs=asked)  # type: ignore[no-untyped-call]
    client = known.master_for(sentinels.service, **{**options, **stated})
    return client, list(known.sentinels)


async def repeated(command: Callable[[], Awaitable[T]]) -> T:
    """The result of `command`, which may run several times.

    A connection that a restart broke says nothing about the server. A server at its `maxclients` hangs up on a new connection,
    often before it can say why, and may have a place in a moment. Thousands of agents may meet both at once. A server that is the
    master no more leads to the one that is; nodes of a Redis Cluster may name each other for a moment.
    """
    for attempt in range(_TRIES):
        try:
            return await command()
        except (RedisConnectionError, ResponseError) as error:
            if not isinstance(error, RedisConnectionError) and not is_of_another_master(error):
                raise
            if attempt and not _is_moved(error) and not any(words in str(error) for words in _HUNG_UP):
                raise
            await asyncio.sleep(random.uniform(0.0, 0.02 * 2**attempt))
    return await command()


# redis-py 5.0 knows the errors of a Redis Cluster in its cluster client only


def asked_of(error: BaseException) -> tuple[str, int] | None:
    """The announced host and port of the node that imports the slot, if `error` says that the key is there or nowhere."""
    is_ask = (isinstance(error, AskError) and not _is_moved(error)) or str(error).startswith("ASK ")
    named = re.search(r"(\S*):(\d+)$", str(error)) if is_ask else None
    return (named[1], int(named[2])) if named else None


def _is_moved(error: BaseException) -> bool:
    return isinstance(error, MovedError) or str(error).startswith("MOVED ")


def is_of_another_master(error: BaseException) -> bool:
    """True if another server is the master of the key, perhaps since a moment ago, or none is that this one knows."""
    # Redis 7 begins its text with READONLY, and redis-py cuts it off; Redis 6 has it in the middle
    is_down = isinstance(error, ClusterDownError) or str(error).startswith("CLUSTERDOWN ")
    return is_down or _is_moved(error) or isinstance(error, ReadOnlyError) or "READONLY" in str(error)


def why(error: BaseException) -> str:
    """One line for people; the same line for the same cause, so that it is told once."""
    text, cause = str(error), error.__cause__ or error.__context__
    if isinstance(error, AttributeError):  # redis-py drops a lost connection's streams while somebody writes to them
        return "Connection closed in mid-command"
    if _is_moved(error):
        return _ONE_OF_SEVERAL
    if isinstance(error, MasterNotFoundError):
        text = text.partition(" : ")[0]  # the rest are redis-py's objects, with their addresses in memory
    elif "@user_script" in text:  # the place in the script, which Redis 6 names first and Redis 7 last
        text = re.sub(r"^.*@user_script: ?\d+: -?| script: .*$", "", text)
    elif isinstance(cause, OSError) and (cause.strerror or str(cause)) not in text:  # redis-py 5 gives its number only
        text = f"{text} {cause}"
    return f"{type(error).__name__}: {text}"
