"""What it costs to find out that another node is at a key: thousands of ranks pass over the same keys at once."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path

import redis

from kcoord.leases.base import Lease, Wait, await_turn
from kcoord.leases.redis import RedisLeases
from kcoord.rank.client import BUSY, AgentClient
from tests.support.agents import Node, key_of
from tests.support.redis_server import RedisServer


def test_ranks_of_a_node_that_pass_over_a_key_cost_one_command_together(tmp_path: Path) -> None:
    with RedisServer() as server:
        shared = {"redis_url": server.url, "store": str(tmp_path / "store")}
        with Node(**shared) as one, Node(**shared) as two, redis.Redis.from_url(server.url) as client:

            def sent(command: str) -> int:
                return int(client.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])

            def pass_over(rank: AgentClient) -> None:
                assert rank.claim(key_of("k"), two.home("k"), wait=False) is BUSY

            one.start()
            two.start()
            leader = one.client()
            lead = one.lead(leader, "k")
            first, *others = (two.client() for _ in range(8))
            pass_over(first)  # its agent tries Redis first
            asked, subscribed, begun = sent("evalsha"), sent("subscribe"), time.monotonic()
            for rank in others:
                pass_over(rank)
            again = (time.monotonic() - begun) // 2.0 + 1
            assert sent("evalsha") - asked <= again, "one for all, and another one every two seconds"
            assert sent("subscribe") == subscribed, "nobody waits, so nobody listens"
            leader.give_up(lead, key_of("k"))


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
