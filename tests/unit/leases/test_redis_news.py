"""News of keys: agents that follow ask for less, hear of what they wait for, and believe nothing that could do harm."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from typing import Any

import pytest
import redis

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Lease, Ready
from kcoord.leases.redis import RedisLeases
from kcoord.testing.leases import BOUND, some_key, waiting, won
from tests.support.redis_server import RedisServer

_TIMES = {"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0}
_CHANNEL = "kcoord:news:news:3"
_KEPT = ("kcoord:news:{news}:facts", "kcoord:news:{news}:receivers")


@asynccontextmanager
async def _agents(server: RedisServer, count: int = 2, **options: Any) -> AsyncIterator[list[RedisLeases]]:
    """Agents that follow the news."""
    async with AsyncExitStack() as stack:
        agents = [RedisLeases(server.url, "news", **{**_TIMES, **options}) for _ in range(count)]
        for agent in agents:
            stack.push_async_callback(agent.close)
            await stack.enter_async_context(agent.watch("it follows"))
        yield agents


async def _until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def _calls(server: RedisServer, command: str) -> int:
    found = re.search(rb"cmdstat_%s:calls=(\d+)" % command.encode(), server.command("INFO", "commandstats"))
    return int(found[1]) if found else 0


async def test_a_key_that_another_agent_has_announced_costs_no_question(redis_server: RedisServer) -> None:
    async with _agents(redis_server) as (one, other):
        key = some_key()
        async with other.watch(key) as watch:
            await (await won(one, key)).ready("m")
            assert await watch.changed(BOUND)
        before = _calls(redis_server, "evalsha")
        for n in range(20):
            assert await other.acquire(key, f"t{n}", "host") == Ready("m")
        assert _calls(redis_server, "evalsha") == before


async def test_a_connection_that_ends_is_followed_by_another_and_nothing_is_missed(redis_server: RedisServer) -> None:
    async with _agents(redis_server) as (one, other):
        key = some_key()
        lease = await won(one, key)
        waiter = await waiting(other, key, "b")
        for _ in range(3):
            redis_server.command("CLIENT", "KILL", "TYPE", "pubsub")
            await asyncio.sleep(0.05)
        began = time.monotonic()
        await lease.ready("m")
        assert await asyncio.wait_for(waiter, BOUND) == Ready("m")
        assert time.monotonic() - began < 1.5, "it asked when the connection ended"


_NONSENSE = [
    b"", b"x", b"\xff\xff\xff", b"2\n", b"-7\nR", b"9" * 400 + b"\nR m", b"2\nR", b"2\nR m", b"2\nR m\t{key}", b"2\nR {key}",
    b"2\nR " + b"m" * 300 + b" {key}", b"2\nR m\xff {key}", b"2\nZ {key}", b"2\n" + b"\n" * 5000, b"2\nC", b"R m {key}",
]  # fmt: skip


async def test_a_message_that_no_agent_wrote_is_no_fact_and_ends_nothing(redis_server: RedisServer) -> None:
    async with _agents(redis_server) as (one, other):
        listener = other._listener
        for nonsense in _NONSENSE:
            redis_server.command("PUBLISH", _CHANNEL, nonsense)
        key = some_key()
        async with other.watch(key) as watch:
            await one.ready(key, "m")
            assert await watch.changed(BOUND)
        assert list(other._ready) == [key]
        assert other._listener is listener


async def test_a_false_fact_costs_a_question_and_nothing_else(redis_server: RedisServer) -> None:
    async with _agents(redis_server, 1) as (agent,):
        key = some_key()
        redis_server.command("PUBLISH", _CHANNEL, f"2\nR untrue {key}")
        await _until(lambda: key in agent._ready)
        assert await agent.acquire(key, "t", "host") == Ready("untrue")
        assert isinstance(await agent.acquire(key, "t", "host", void="untrue"), Lease), "its fetch has missed"


@pytest.mark.parametrize("name", _KEPT)
@pytest.mark.parametrize(
    "value", [("SET", "junk"), ("RPUSH", "junk"), ("HSET", "a", "b"), ("SET", "9" * 400), ("SET", "7", "PX", "9" * 12)]
)
async def test_whatever_is_in_the_keys_of_news_news_is_told_again(
    redis_server: RedisServer, name: str, value: tuple[str, ...]
) -> None:
    async with _agents(redis_server) as (one, other):
        redis_server.command(value[0], name, *value[1:])
        keys = [some_key() for _ in range(3)]
        for key in keys:
            await one.ready(key, "m")
            await asyncio.sleep(0.01)
        await _until(lambda: other._ready.keys() >= set(keys))


@contextmanager
def _subscribers(server: RedisServer, count: int) -> Iterator[None]:
    """As many agents as that, as far as the server can tell."""
    with ExitStack() as stack:
        for _ in range(count):
            subscriber = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
            subscriber.sendall(b"SUBSCRIBE %s\r\n" % _CHANNEL.encode())
            subscriber.recv(100)
        yield


async def test_a_burst_of_news_of_many_agents_goes_in_few_messages_the_more_of_them_follow(
    redis_server: RedisServer,
) -> None:
    """One message to 1,250 nodes costs the server 10 ms: 300 of them, one by one, would block it for 3 s."""
    async with _agents(redis_server, 10) as agents:
        messages, told_within = {}, {}
        for followers in (10, 510):
            with _subscribers(redis_server, followers - 10):
                await agents[0].ready(some_key(), "m")  # the distance is that of the last message
                await asyncio.sleep(0.2)
                before, began = _calls(redis_server, "publish"), time.monotonic()
                keys = [some_key() for _ in range(300)]
                await asyncio.gather(*(agents[n % 10].ready(key, "m") for n, key in enumerate(keys)))
                await _until(lambda keys=keys: all(agent._ready.keys() >= set(keys) for agent in agents))
                told_within[followers] = time.monotonic() - began
                messages[followers] = _calls(redis_server, "publish") - before
        assert messages[510] <= told_within[510] / 0.030 + 2, "30 ms for 510"
        assert told_within[510] < 2.0
        assert messages[10] > 2 * messages[510]


async def test_what_an_agent_that_ended_left_is_told_with_the_next_news(redis_server: RedisServer) -> None:
    async with _agents(redis_server) as (one, other):
        first, second = some_key(), some_key()
        redis_server.command("RPUSH", _KEPT[0], f"R m {first}")
        await one.ready(second, "m")
        await _until(lambda: other._ready.keys() >= {first, second})


async def test_an_agent_that_may_not_follow_is_told_at_once_and_does_not_insist(redis_server: RedisServer) -> None:
    service = RedisLeases(redis_server.url, "news", **_TIMES)
    redis_server.command("ACL", "SETUSER", "default", "-subscribe")
    began = time.monotonic()
    with pytest.raises(LeaseUnavailable, match="subscribe"):
        await service.watch("k").__aenter__()
    assert time.monotonic() - began < 1.5
    redis_server.command("ACL", "SETUSER", "default", "+subscribe")
    async with service.watch("k"):
        pass
    await service.close()


async def test_sixty_agents_that_start_in_one_moment_are_served_over_two_connections_each(
    redis_server: RedisServer,
) -> None:
    agents = [RedisLeases(redis_server.url, "news", **_TIMES) for _ in range(60)]
    async with AsyncExitStack() as stack:
        await asyncio.gather(*(stack.enter_async_context(agent.watch("k")) for agent in agents))
        answers = await asyncio.gather(*(agent.acquire("k", f"{n}", "host") for n, agent in enumerate(agents)))
        assert sum(isinstance(answer, Lease) for answer in answers) == 1
        assert redis_server.command("CLIENT", "LIST").count(b" addr=") <= 2 * 60 + 1
    for agent in agents:
        await agent.close()


async def test_a_namespace_leaves_two_keys_of_news_which_end(redis_server: RedisServer) -> None:
    async with _agents(redis_server) as agents:
        for n in range(50):
            await agents[n % 2].ready(f"{n}", "m")
    with redis.Redis.from_url(redis_server.url, protocol=2) as client:
        for name in client.keys("kcoord:news:{news}:*"):
            assert 0 < client.pttl(name) <= 602_000
            assert client.memory_usage(name) < 64 << 10
