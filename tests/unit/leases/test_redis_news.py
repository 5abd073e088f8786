"""News of keys: agents that follow ask for less, hear of what they wait for, and believe nothing that could do harm."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from typing import Any

import msgpack
import pytest
import redis
from redis.asyncio.connection import AbstractConnection

from kcoord.errors import LeaseUnavailable
from kcoord.leases import redis_news
from kcoord.leases.base import Lease, Ready, Wait, await_turn
from kcoord.leases.redis import RedisLeases
from kcoord.testing.leases import AT_ONCE, BOUND, some_key, waiting, won
from tests.support.redis_server import RedisServer

_TIMES = {"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0}


@asynccontextmanager
async def _agents(server: RedisServer, count: int = 2) -> AsyncIterator[list[RedisLeases]]:
    """Agents that follow the news."""
    agents = [RedisLeases(server.url, "news", **_TIMES) for _ in range(count)]
    try:
        for agent in agents:
            await agent._tried_once()
        yield agents
    finally:
        for agent in agents:
            await agent.close()


async def _until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.005)


def _calls(server: RedisServer, command: str) -> int:
    found = re.search(rb"cmdstat_%s:calls=(\d+)" % command.encode(), server.command("INFO", "commandstats"))
    return int(found[1]) if found else 0


def _publish(server: RedisServer, agent: RedisLeases, *facts: list[object]) -> None:
    server.command("PUBLISH", agent._news._name, b"2 " + msgpack.packb(["somebody", list(facts)]))


async def test_a_key_that_another_agent_has_announced_costs_no_question(redis_server: RedisServer) -> None:
    async with _agents(redis_server) as (one, other):
        ready, led = some_key(), some_key()
        await (await won(one, ready)).ready("m")
        await won(one, led)
        await _until(lambda: other._facts.known(ready) and other._facts.known(led))
        before = _calls(redis_server, "evalsha")
        for n in range(20):
            assert await other.acquire(ready, f"t{n}", "host") == Ready("m")
            answer = await other.acquire(led, f"t{n}", "host")
            assert isinstance(answer, Wait)
            assert (answer.holder, 29 < answer.ttl <= 30) == ("host-a", True)
        assert _calls(redis_server, "evalsha") == before


@pytest.mark.parametrize(("followers", "luck", "told"), [(2, 0.99, True), (1000, 0.0019, True), (1000, 0.003, False),
                                                         (0, 0.06, True), (0, 0.07, False)])  # fmt: skip
async def test_a_few_of_the_agents_that_ask_for_what_an_earlier_job_made_tell_the_others(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, followers: int, luck: float, told: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(redis_news.random, "random", lambda: luck)
        async with _agents(redis_server) as (one, other):
            key, after = some_key(), some_key()
            await one._run(key, "ready", "", "m", 60_000)  # before anybody listened
            assert other._facts.known(key) is None
            one._facts.followers = followers
            assert await one.acquire(key, "t", "host") == Ready("m")
            await one.ready(after, "m")
            await _until(lambda: other._facts.known(after))
            assert other._facts.known(key) == (Ready("m") if told else None)


async def test_who_waits_asks_once_until_it_is_told(redis_server: RedisServer) -> None:
    async with _agents(redis_server, 4) as (one, *others):
        key = some_key()
        lease = await won(one, key)
        await _until(lambda: all(other._facts.known(key) for other in others))
        before = _calls(redis_server, "evalsha"), _calls(redis_server, "subscribe")
        waiters = [await waiting(other, key, "b") for other in others]
        assert (_calls(redis_server, "evalsha"), _calls(redis_server, "subscribe")) == before
        began = time.monotonic()
        await lease.ready("m")
        assert await asyncio.gather(*waiters) == [Ready("m")] * 3
        assert time.monotonic() - began < 1.5
        assert _calls(redis_server, "evalsha") == before[0] + 2, "the one that is ready, and its announcement"


async def test_who_comes_later_knows_what_was_ready_before(redis_server: RedisServer) -> None:
    async with _agents(redis_server, 1) as (one,):
        keys = [some_key() for _ in range(600)]  # more than are kept
        for key in keys:
            await one.ready(key, "m")
            await asyncio.sleep(0)
        await (await won(one, keys[-1], void="m")).release()
        await _until(lambda: not one._news._outgoing and one._news._sender and one._news._sender.done())
        async with _agents(redis_server, 1) as (late,):
            await _until(lambda: late._facts.known(keys[-2]))
            assert late._facts.known(keys[0]) is None
            assert late._facts.known(keys[-1]) is None, "it is not ready any more"
            assert await late.acquire(keys[-2], "t", "host") == Ready("m")


async def test_a_leader_that_announces_nothing_is_waited_for_no_longer_than_before_there_were_news(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _agents(redis_server) as (silent, other):
        monkeypatch.setattr(silent._news, "_announce", lambda *fact: None)
        key = some_key()
        lease = await won(silent, key)
        waiter = await waiting(other, key, "b")
        began = time.monotonic()
        await lease.ready("m")
        assert await asyncio.wait_for(waiter, BOUND) == Ready("m")
        assert time.monotonic() - began < 3.0


async def test_what_is_known_is_forgotten_when_the_server_falls_silent(redis_server: RedisServer) -> None:
    """The breaker opens by then, and other nodes may use another service."""
    async with _agents(redis_server, 1) as (agent,):
        ready = some_key()
        await agent.ready(ready, "m")
        assert agent._facts.known(ready)
        redis_server.pause()
        with pytest.raises(LeaseUnavailable):
            await agent.acquire(some_key(), "t", "host")
        assert not agent._facts.known(ready)
        with pytest.raises(LeaseUnavailable):
            await agent.acquire(ready, "t", "host")
        redis_server.resume()
        assert await agent.acquire(ready, "t", "host") == Ready("m")


async def test_a_refusal_by_a_server_that_is_well_costs_nothing_of_what_is_known(redis_server: RedisServer) -> None:
    """A full server refuses a new lease, and an ACL may lack one command."""
    async with _agents(redis_server, 1) as (agent,):
        ready = some_key()
        await agent.ready(ready, "m")
        listener = agent._news._listener
        with redis_server.session() as command:
            command("ACL", "SETUSER", "default", "-hset")
            try:
                with pytest.raises(LeaseUnavailable):
                    await agent.acquire(some_key(), "t", "host")
            finally:
                command("ACL", "SETUSER", "default", "+hset")
        assert agent._facts.known(ready) == Ready("m")
        assert agent._news._listener is listener


async def test_a_server_is_followed_again_after_an_outage_of_hours(redis_server: RedisServer) -> None:
    """Its attempts are counted: 2 to the power of that is no float after half an hour."""
    async with _agents(redis_server, 1) as (agent,):
        agent._news.doubt()
        agent._news._failed = 5000
        await agent.acquire(some_key(), "t", "host")
        await agent.ping()
        assert agent._news._failed == 0


async def test_an_unforeseen_error_of_the_listener_is_met_once_and_not_in_a_loop(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with _agents(redis_server, 1) as (agent,):
        agent._news.doubt()
        tried = []

        def connect() -> None:
            tried.append(1)
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patch:
            patch.setattr(agent._news, "_connect", connect)
            with pytest.raises(LeaseUnavailable, match="can't start new thread"):
                await agent.ping()
            assert len(tried) <= 3
        await agent.ping()


async def test_many_facts_of_one_moment_arrive_in_messages_that_a_server_can_keep(redis_server: RedisServer) -> None:
    """It keeps a copy for each receiver that has not read."""
    async with _agents(redis_server) as (one, other):
        keys = [f"{n:064x}" for n in range(2000)]
        sizes, take = [], other._news._take

        def measured(message: bytes) -> None:
            sizes.append(len(message))
            take(message)

        other._news._take = measured
        with redis_server.session() as command:
            seconds, micros = (int(part) for part in command("TIME").split(b"\r\n")[2:5:2])
            command("HSET", one._news._name, "due", str(seconds * 10**6 + micros + 200_000), "receivers", "9")
        due_in = 0.0
        for first in range(0, len(keys), 50):
            facts = [("R", key, "0" * 64) for key in keys[first : first + 50]]
            due_in = await one._news.publish(msgpack.packb(["another", facts]))
        while due_in:
            await asyncio.sleep(due_in)
            due_in = await one._news.publish(b"")
        await _until(lambda: all(other._facts.known(key) for key in keys))
        assert max(sizes) <= 33 << 10
        assert len(sizes) > 5


async def test_a_connection_that_ends_is_followed_by_another_and_nothing_is_missed(redis_server: RedisServer) -> None:
    async with _agents(redis_server) as (one, other):
        key = some_key()
        lease = await won(one, key)
        waiter = await waiting(other, key, "b")
        redis_server.command("CLIENT", "KILL", "TYPE", "pubsub")
        await _until(lambda: not other._facts.live)
        began = time.monotonic()
        await lease.ready("m")
        assert await asyncio.wait_for(waiter, BOUND) == Ready("m")
        assert time.monotonic() - began < 1.5, "it asked when the connection ended, and caught up"
        await _until(lambda: other._facts.live)


_NONSENSE = [
    b"",
    b"x",
    b"\xff\xff\xff",
    b"2 ",
    b"2 \xc1\xc1",
    b"2 " + b"\x91" * 5000,
    b"-7 " + msgpack.packb([]),
    b"9" * 400 + b" " + msgpack.packb(["a", []]),
    *(
        b"2 " + msgpack.packb(said)
        for said in (
            7, ["a"], ["a", "b"], ["a", [7]], ["a", [[]]], ["a", [["R", "{key}"]]], ["a", [["R", "{key}", "m\n"]]],
            ["a", [["R", 7, "m"]]], ["a", [["R", "{key}", "m" * 300]]], ["a", [["L", "{key}", "h", "soon"]]],
            ["a", [["L", "{key}", "h", float("nan")]]], ["a", [["L", "{key}", "h", -1]]], ["a", [["Z", "{key}"]]],
            ["a", {"R": 1}], [["R", "{key}", "m"]],
        )
    ),
]  # fmt: skip


async def test_a_message_that_no_agent_wrote_is_no_fact_and_ends_nothing(redis_server: RedisServer) -> None:
    async with _agents(redis_server) as (one, other):
        await _until(lambda: other._facts.live)
        connection = other._news._connection
        for nonsense in _NONSENSE:
            redis_server.command("PUBLISH", other._news._name, nonsense)
        key = some_key()
        await one.ready(key, "m")
        await _until(lambda: other._facts.known(key))
        assert other._facts.known("{key}") is None
        assert other._news._connection is connection


async def test_false_facts_cost_a_question_and_nothing_else(redis_server: RedisServer) -> None:
    async with _agents(redis_server, 1) as (agent,):
        ready, led = some_key(), some_key()
        _publish(redis_server, agent, ["R", ready, "untrue"], ["L", led, "evil" * 1000, 1e300])
        await _until(lambda: agent._facts.known(led))
        assert await agent.acquire(ready, "t", "host") == Ready("untrue")
        assert isinstance(await agent.acquire(ready, "t", "host", void="untrue"), Lease), "its fetch has missed"
        began = time.monotonic()
        assert isinstance(await await_turn(agent, led, "t", "host"), Lease)
        assert time.monotonic() - began < 3.0, "it looks again after two seconds"


@pytest.mark.parametrize(
    "value",
    [
        ("SET", "{key}", "junk"),
        ("RPUSH", "{key}", "junk"),
        ("HSET", "{key}", "last", "nan", "sent", "inf", "due", "9" * 400, "receivers", "-1e400"),
        ("HSET", "{key}", "last", "9" * 15, "sent", "0", "due", "9" * 16, "receivers", "junk"),
        ("HSET", "{key}", "last", "1.5", "sent", "0.25", "1", b"\xff"),
        ("HSET", "{key}", "last", "10", "sent", "20"),
    ],
    ids=lambda value: f"{value[0]} {value[2]} {value[3] if len(value) > 3 else ''}",
)
async def test_whatever_is_in_the_news_key_news_is_told_again(
    redis_server: RedisServer, value: tuple[str | bytes, ...]
) -> None:
    async with _agents(redis_server) as (one, other):
        name = one._news._name
        redis_server.command("DEL", name)
        redis_server.command(*(name if word == "{key}" else word for word in value))
        first, second = some_key(), some_key()
        await one.ready(first, "m")
        await _until(lambda: not one._news._outgoing)
        await one.ready(second, "m")
        await _until(lambda: other._facts.known(second))
        async with _agents(redis_server, 1) as (late,):
            await _until(lambda: late._facts.known(second))
        assert 0 < int(redis_server.command("PTTL", name)[1:]) <= 600_000


@contextmanager
def _subscribers(server: RedisServer, name: str, count: int) -> Iterator[None]:
    """As many agents as that, as far as the server can tell."""
    with ExitStack() as stack:
        for _ in range(count):
            subscriber = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 10))
            subscriber.sendall(b"SUBSCRIBE %s\r\n" % name.encode())
            subscriber.recv(100)
        yield


async def test_the_more_agents_follow_the_fewer_messages_carry_the_same_news(redis_server: RedisServer) -> None:
    async with _agents(redis_server) as (one, other):
        messages = {}
        for followers in (2, 502):
            with _subscribers(redis_server, one._news._name, followers - 2):
                await one.ready(some_key(), "m")  # finds out how many there are
                await asyncio.sleep(0.3)  # and no message is due
                before, began, keys = _calls(redis_server, "publish"), time.monotonic(), []
                while time.monotonic() < began + 0.4:
                    keys.append(some_key())
                    await one.ready(keys[-1], "m")
                    await asyncio.sleep(0.002)
                await _until(lambda keys=keys: all(map(other._facts.known, keys)))
                messages[followers] = _calls(redis_server, "publish") - before
                took = time.monotonic() - began
        assert messages[502] <= took / 0.030 + 2, "30 ms for 502"
        assert messages[2] > 2 * messages[502]


async def test_what_an_agent_left_pending_is_published_with_the_next_news(redis_server: RedisServer) -> None:
    async with _agents(redis_server) as (one, other):
        with _subscribers(redis_server, one._news._name, 500):
            keys = [some_key() for _ in range(3)]
            said = [msgpack.packb(["it ended", [["R", key, "m"]]]) for key in keys]
            assert await one._news.publish(said[0]) == 0
            assert 0 < await one._news.publish(said[1]) < 0.1
            assert other._facts.known(keys[1]) is None
            await asyncio.sleep(0.1)  # its time has come, and it does not publish
            assert await one._news.publish(said[2]) == 0
            await _until(lambda: all(map(other._facts.known, keys)))


async def test_an_agent_that_asks_for_nothing_follows_no_more_until_it_does(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_news, "_RESTS", 0.3)
    monkeypatch.setattr(redis_news, "_SILENCE", 0.1)
    async with _agents(redis_server, 1) as (agent,):
        key = some_key()
        await won(agent, key)
        await _until(lambda: b"addr=" not in redis_server.command("CLIENT", "LIST", "TYPE", "pubsub"))
        assert isinstance(await agent.acquire(key, "b", "host"), Wait)
        waiter = await waiting(agent, key, "b")
        await asyncio.sleep(0.6)  # longer than it rests
        assert agent._facts.live, "it has one who waits"
        began = time.monotonic()
        await agent.ready(key, "m")
        assert await waiter == Ready("m")
        assert time.monotonic() - began < AT_ONCE


async def test_agents_of_a_restarted_server_follow_it_again(redis_server: RedisServer) -> None:
    async with _agents(redis_server, 3) as agents:
        redis_server.restart()
        await _until(lambda: not any(agent._facts.live for agent in agents))
        key = some_key()

        async def patiently(agent: RedisLeases) -> object:
            try:
                return await agent.acquire(key, f"{id(agent)}", "host")
            except LeaseUnavailable:
                return None

        deadline = time.monotonic() + BOUND
        while not all(agent._facts.live for agent in agents):
            assert time.monotonic() < deadline
            for agent in agents:
                await patiently(agent)
            await asyncio.sleep(0.05)
        await agents[0].ready(key, "m")
        await _until(lambda: all(agent._facts.known(key) == Ready("m") for agent in agents))


async def test_a_watch_that_begins_while_the_news_are_doubted_begins_all_the_same(redis_server: RedisServer) -> None:
    """A server closes idle connections, say; else its breaker would open for a server that is well."""
    async with _agents(redis_server, 1) as (agent,):
        agent._news.doubt()
        entering = asyncio.create_task(agent.watch("k").__aenter__())
        await asyncio.sleep(0)
        agent._news.doubt()
        await asyncio.wait_for(entering, BOUND)
        assert agent._facts.live
        redis_server.command("CLIENT", "KILL", "TYPE", "normal")
        redis_server.command("CLIENT", "KILL", "TYPE", "pubsub")
        await agent.ping()


async def test_a_watch_that_begins_while_the_old_connection_is_being_closed_waits_for_the_new_one(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    disconnect = AbstractConnection.disconnect

    async def slowly(connection: Any, nowait: bool = False) -> None:
        await asyncio.sleep(0.3)
        await disconnect(connection, nowait)

    async with _agents(redis_server, 1) as (agent,):
        monkeypatch.setattr(AbstractConnection, "disconnect", slowly)
        redis_server.command("CLIENT", "KILL", "TYPE", "pubsub")
        await _until(lambda: not agent._facts.live)
        async with agent.watch("k"):
            assert agent._facts.live
        monkeypatch.undo()
        await _until(lambda: not agent._news._leaving)


async def test_an_agent_that_may_not_follow_is_told_at_once_and_does_not_insist(redis_server: RedisServer) -> None:
    service = RedisLeases(redis_server.url, "news", **_TIMES)
    redis_server.command("ACL", "SETUSER", "default", "-subscribe")
    began = time.monotonic()
    with pytest.raises(LeaseUnavailable, match="subscribe"):
        await service.watch("k").__aenter__()
    assert time.monotonic() - began < 1.5
    redis_server.command("ACL", "SETUSER", "default", "+subscribe")
    async with service.watch("k"):
        assert service._facts.live
    await service.close()


async def test_sixty_agents_that_start_in_one_moment_are_served(redis_server: RedisServer) -> None:
    agents = [RedisLeases(redis_server.url, "news", **_TIMES) for _ in range(60)]
    answers = await asyncio.gather(*(agent.acquire("k", f"{n}", "host") for n, agent in enumerate(agents)))
    assert sum(isinstance(answer, Lease) for answer in answers) == 1
    assert redis_server.command("CLIENT", "LIST").count(b" addr=") <= 2 * 60 + 1
    for agent in agents:
        await agent.close()


async def test_an_agent_that_finds_the_server_full_is_let_in_when_another_leaves(redis_server: RedisServer) -> None:
    async with _agents(redis_server, 1) as (agent,):
        with redis_server.session() as command:
            command("CONFIG", "SET", "maxclients", 3)  # this one, and the agent's two
            newcomer = RedisLeases(redis_server.url, "news", **_TIMES)
            asking = asyncio.create_task(newcomer.acquire("k", "a", "host"))
            await asyncio.sleep(0.1)  # it was refused by then
            assert not asking.done()
            command("CONFIG", "SET", "maxclients", 100)
            assert isinstance(await asyncio.wait_for(asking, BOUND), Lease)
            await newcomer.close()
            assert isinstance(await agent.acquire("l", "a", "host"), Lease)


async def test_a_namespace_leaves_one_key_of_news_which_ends(redis_server: RedisServer) -> None:
    async with _agents(redis_server) as agents:
        for n in range(50):
            await agents[n % 2].ready(f"{n}", "m")
    with redis.Redis.from_url(redis_server.url, protocol=2) as client:
        (name,) = client.keys("kcoord:{news}:news:*")
        assert 0 < client.pttl(name) <= 600_000
        assert client.memory_usage(name) < 64 << 10
