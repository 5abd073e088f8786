"""The compiling rank dies, in every way that a process can: another rank leads at once, here or on another node."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import redis

from kcoord.artifacts import local
from kcoord.artifacts.store import Store
from tests.support.agents import Node, Rank, key_of, until, watching
from tests.support.redis_server import RedisServer

BOUND = 5.0  # seconds from a death to the next leader; the TTL is far above, the exact figure is a benchmark's business
TTL = 60.0

RANK = """
import ctypes, os, resource, sys, time
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
answer = claim(client, {key!r})
if isinstance(answer, Lead):
    staging = stage(home_of({key!r}), "half a kernel")
    child = 0
    if {forks}:
        child = ctypes.PyDLL(None).fork()  # as a C library forks: Python's hooks, which close the copy, do not run
        if child == 0:
            time.sleep(120)
            os._exit(0)
    say("compiling", child=child, inode=os.fstat(answer.connection.fileno()).st_ino)
    if listen() == "publish":
        say("published", well=client.publish(answer, key_of({key!r}), staging, home_of({key!r}), 0.5, ""))
    else:
        {death}
"""


@dataclass(frozen=True)
class Death:
    """How a rank dies: by a statement of its own, or by what is done to its pid; and the exit code that shows it."""

    code: int
    statement: str = "time.sleep(120)"
    inflict: Callable[[int], None] | None = None


def _signal(number: signal.Signals) -> Death:
    return Death(-number, inflict=lambda pid: os.kill(pid, number))


DEATHS = {
    "SIGKILL": _signal(signal.SIGKILL),
    "SIGTERM": _signal(signal.SIGTERM),
    "os._exit": Death(3, "os._exit(3)"),
    "an exception": Death(1, "raise RuntimeError('it is all over')"),
    "a segmentation fault": Death(-signal.SIGSEGV, "ctypes.string_at(0)"),
}


class Cluster:
    """Two nodes, one Redis, one store; and the ranks of one test, which are gone when it ends."""

    def __init__(self, server: RedisServer, store: Path, one: Node, two: Node) -> None:
        self.one, self.two, self.store = one, two, store
        self.agents = {node: node.start() for node in (one, two)}
        self._redis = redis.Redis.from_url(server.url)
        self._ranks: list[Rank] = []
        self._children: list[int] = []

    def rank(self, node: Node, key: str, death: Death, *, forks: bool = False) -> Rank:
        code = RANK.format(key=key, forks=forks, death=death.statement)
        rank = Rank(code, node.environ(PYTHONWARNINGS="ignore"))
        self._ranks.append(rank)
        return rank

    def compiling(self, rank: Rank) -> dict[str, str]:
        """What the rank says of itself once it leads."""
        rank.expect("Lead", BOUND)
        facts = rank.expect("compiling")
        if facts["child"]:
            self._children.append(facts["child"])
        return facts

    def waiters(self) -> int:
        return sum(len(f["waiting"]) for node in (self.one, self.two) for f in node.status()["flights"])

    def leases(self) -> list[bytes]:
        """The keys that are leased now, as Redis has it."""
        names = list(self._redis.scan_iter(match="kcoord:*:lease:*"))
        return [n for n in names if (self._redis.get(n) or b"")[:1] == b"L"]

    def end(self) -> None:
        ranks, self._ranks = self._ranks, []
        children, self._children = self._children, []
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for rank in ranks:
            rank.kill()
            rank.end()

    def close(self) -> None:
        self._redis.close()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Cluster]:
    with RedisServer() as server, tempfile.TemporaryDirectory(prefix="kc-") as store:
        shared = {"redis_url": server.url, "store": store, "lease_ttl": str(TTL)}
        with Node(**shared) as one, Node(**shared) as two:
            cluster = Cluster(server, Path(store), one, two)
            try:
                yield cluster
            finally:
                cluster.close()


@pytest.fixture
def cluster(nodes: Cluster) -> Iterator[Cluster]:
    try:
        yield nodes
    finally:
        nodes.end()


def die(rank: Rank, death: Death) -> float:
    """The moment of its death, or of the order to die."""
    moment = time.monotonic()
    if death.inflict is not None:
        death.inflict(rank.pid)
    else:
        rank.tell("die")
    assert rank.process.wait(60) == death.code
    return moment


@pytest.mark.parametrize(
    ("name", "forks"),
    [*((name, False) for name in DEATHS), pytest.param("SIGKILL", True, id="SIGKILL, whose child holds its socket")],
)
def test_one_other_rank_leads_when_the_leader_dies_by(cluster: Cluster, name: str, forks: bool) -> None:
    """First one of the same node, then one of the other node, which has nobody left to wait for."""
    death, key = DEATHS[name], f"{name}, {forks}"
    one, two = cluster.one, cluster.two
    first = cluster.rank(one, key, death, forks=forks)
    dead = [cluster.compiling(first)]
    second = cluster.rank(one, key, death, forks=forks)
    one.until_waiting(key, 1)
    third = cluster.rank(two, key, death)
    two.until_waiting(key, 1)
    fourth = cluster.rank(two, key, death)
    two.until_waiting(key, 2)

    die(first, death)
    dead.append(cluster.compiling(second))
    assert f"pid {second.pid})" in one.flight(key)["leader"]
    assert one.flight(key)["waiting"] == []
    assert (two.flight(key)["state"], len(two.flight(key)["waiting"])) == ("waiting for another node", 2)

    moment = die(second, death)
    dead.append(cluster.compiling(third))
    assert time.monotonic() - moment < TTL / 2, "nobody waited for the lease to end"
    assert one.flight(key) == {}
    assert f"pid {third.pid})" in two.flight(key)["leader"]
    assert len(two.flight(key)["waiting"]) == 1
    assert len(cluster.leases()) == 1
    if forks:
        for facts in dead[:2]:
            kept = [os.fspath(d.readlink()) for d in Path(f"/proc/{facts['child']}/fd").iterdir()]
            assert f"socket:[{facts['inode']}]" in kept, "the child kept nothing open: the test shows nothing"

    third.tell("publish")
    assert third.expect("published") == {"well": True}
    assert fourth.expect("Ready") == {"source": "wait"}
    assert two.read(key) == "half a kernel"
    until(lambda: key_of(key).digest in {m.key.digest for m in Store(cluster.store).manifests()})
    nothing_is_left(cluster)


def nothing_is_left(cluster: Cluster) -> None:
    """Of the dead: no flight, no lease."""
    until(lambda: cluster.leases() == [])
    for node in (cluster.one, cluster.two):
        until(lambda n=node: n.status()["flights"] == [])  # type: ignore[misc]


def connections(pid: int, path: Path) -> int:
    """An agent's sockets: the one that it listens on, and one for each client that it thinks it has."""
    return sum(c.laddr == str(path) for c in psutil.Process(pid).net_connections(kind="unix"))


@pytest.mark.smoke
def test_a_leader_that_is_killed_while_it_publishes_has_published(cluster: Cluster) -> None:
    """What was handed in is the agent's to finish."""
    node = cluster.one
    leader = node.rank(
        """
        import os
        lead = claim(client, "big")
        staging = stage(home_of("big"))
        for number in range(24):
            (staging / f"{number}.bin").write_bytes(os.urandom(1 << 20))
        say("staged")
        listen()
        client.publish(lead, key_of("big"), staging, home_of("big"), 0.5, "")
        listen()
        """
    )
    leader.expect("Lead")
    leader.expect("staged")
    waiter = node.rank("claim(client, 'big')")
    node.until_waiting("big", 1)
    leader.tell()
    until(lambda: node.flight("big").get("state") in ("publishing", None))
    leader.kill()
    assert waiter.expect("Ready") == {"source": "wait"}
    artifact = local.open_artifact(node.home("big"), key_of("big").digest)
    assert artifact is not None
    assert len(artifact.manifest.files) == 25
    nothing_is_left(cluster)


def test_the_agent_closes_a_dead_rank_s_connections_although_its_child_keeps_the_other_end(cluster: Cluster) -> None:
    rank = cluster.rank(cluster.one, "orphan", DEATHS["SIGKILL"], forks=True)
    child = int(cluster.compiling(rank)["child"])
    agent = cluster.agents[cluster.one]
    assert connections(agent.pid, cluster.one.path) > 1
    with watching(child) as ended:
        die(rank, DEATHS["SIGKILL"])
        until(lambda: connections(agent.pid, cluster.one.path) == 1)
        assert not ended(0), "its end closed it: the test shows nothing"
    nothing_is_left(cluster)
