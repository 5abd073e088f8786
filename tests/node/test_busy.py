"""What it costs to find out that another node is at a key: thousands of ranks pass over the same keys at once."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from kcoord.leases.base import Lease, Wait, await_turn
from kcoord.leases.redis import RedisLeases
from kcoord.rank.client import BUSY, AgentClient, Failed, Lead, Ready
from tests.support.agents import Node, in_thread, key_of
from tests.support.redis_server import RedisServer

RANKS = 8


class Cluster:
    """Two nodes with agents, one Redis and one store."""

    def __init__(self, server: RedisServer, one: Node, two: Node) -> None:
        self.one, self.two = one, two
        self._redis = redis.Redis.from_url(server.url)
        one.start()
        two.start()

    def clients(self) -> list[AgentClient]:
        return [self.two.client() for _ in range(RANKS)]

    def commands(self) -> dict[str, int]:
        """What the server has been sent for leases and subscriptions so far."""
        sent = self._redis.info("commandstats")
        return {n: sent[f"cmdstat_{n}"]["calls"] for n in ("evalsha", "subscribe") if f"cmdstat_{n}" in sent}

    def close(self) -> None:
        self._redis.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with RedisServer() as server:
        shared = {"redis_url": server.url, "store": str(tmp_path / "store")}
        with Node(**shared) as one, Node(**shared) as two:
            cluster = Cluster(server, one, two)
            try:
                yield cluster
            finally:
                cluster.close()


def hurried(node: Node, client: AgentClient, name: str) -> object:
    return client.claim(key_of(name), node.home(name), wait=False)


def test_ranks_of_a_node_that_pass_over_a_key_cost_one_command_together(cluster: Cluster) -> None:
    leader = cluster.one.client()
    lead = cluster.one.claim(leader, "k")
    assert isinstance(lead, Lead)
    first, *others = cluster.clients()
    assert hurried(cluster.two, first, "k") is BUSY  # its agent tries Redis first
    before, begun = cluster.commands(), time.monotonic()
    for client in others:
        assert hurried(cluster.two, client, "k") is BUSY
    after, took = cluster.commands(), time.monotonic() - begun
    assert after["evalsha"] - before["evalsha"] <= took // 2.0 + (took > 1), (
        "one for all, and another one every two seconds"
    )
    assert after.get("subscribe", 0) == before.get("subscribe", 0), "nobody waits, so nobody listens"
    leader.give_up(lead, key_of("k"))


def test_a_rank_that_waits_hears_what_its_neighbours_passed_over(cluster: Cluster) -> None:
    leader = cluster.one.client()
    lead = cluster.one.claim(leader, "k")
    first, second, *_ = cluster.clients()
    assert hurried(cluster.two, first, "k") is BUSY
    waiting = cluster.two.claiming(second, "k")
    cluster.two.until_waiting("k", 1)
    assert hurried(cluster.two, first, "k") is BUSY
    assert cluster.one.publish(leader, lead, "k")
    assert waiting.result(20) == Ready("wait")
    assert cluster.two.read("k") == "a kernel"
    assert hurried(cluster.two, first, "k") == Ready("store"), "and what it waited for is no longer busy"


def test_a_key_that_was_passed_over_is_led_by_who_waits_for_it_when_its_holder_fails(cluster: Cluster) -> None:
    leader = cluster.one.client()
    lead = cluster.one.claim(leader, "k")
    assert isinstance(lead, Lead)
    first, second, *_ = cluster.clients()
    assert hurried(cluster.two, first, "k") is BUSY
    leader.give_up(lead, key_of("k"))
    mine = in_thread(lambda: cluster.two.claim(second, "k")).result(20)
    assert isinstance(mine, Lead), "what was remembered holds up nobody who waits"
    second.fail(mine, key_of("k"), "no registers")
    assert isinstance(hurried(cluster.two, first, "k"), Failed)


def test_who_does_not_stay_has_asked_once_and_holds_nothing() -> None:
    async def scenario(url: str) -> None:
        service = RedisLeases(url, "test", ttl=30.0, limit=60.0, failure_ttl=30.0)
        try:
            lease = await service.acquire("k", "a", "host-a")
            assert isinstance(lease, Lease)
            seen: list[Wait] = []
            asked = commands(server)
            answer = await await_turn(service, "k", "b", "host-b", stays=lambda wait: bool(seen.append(wait)))
            assert answer is None
            assert [wait.holder for wait in seen] == ["host-a"]
            assert commands(server) == asked + 1
            await lease.release()
            assert isinstance(await service.acquire("k", "c", "host-c"), Lease), "nothing stands in the next one's way"
        finally:
            await service.close()

    def commands(server: RedisServer) -> int:
        (calls,) = re.findall(rb"cmdstat_evalsha:calls=(\d+)", server.command("INFO", "commandstats"))
        return int(calls)

    with RedisServer() as server:
        asyncio.run(asyncio.wait_for(scenario(server.url), 30))
