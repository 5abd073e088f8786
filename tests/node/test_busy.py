"""What it costs to find out that another node is at a key: thousands of ranks pass over the same keys at once."""

from __future__ import annotations

import time
from pathlib import Path

import redis

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
