"""Redis first; while it is away lease files, if there is a store; this node's own leases if nothing else is left."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kcoord.artifacts.store import Store
from kcoord.cli import status
from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Answer, Lease, LeaseService, Ready, Wait, Watch, leased
from kcoord.leases.breaker import Breaker
from kcoord.leases.files import FileLeases
from kcoord.leases.local import LocalLeases
from kcoord.leases.redis import RedisLeases
from kcoord.testing.leases import BOUND, LeaseConformance, some_key, waiting, won
from tests.support.redis_server import RedisServer

_TIMES = {"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0}
_SOON = {"every": 0.1, "back_within": 0.1}  # what is tested is that it closes, not when


@asynccontextmanager
async def breaker_at(url: str, lines: list[str], namespace: str = "test", **times: float) -> AsyncIterator[Breaker]:
    times = {**_TIMES, **times}
    service = Breaker(RedisLeases(url, namespace, silence=1.0, **times), LocalLeases(**times), lines.append, **_SOON)
    try:
        yield service
    finally:
        await service.close()


@pytest.fixture
def store(tmp_path: Path) -> Path:
    Store(tmp_path / "store").open()
    return tmp_path / "store"


@asynccontextmanager
async def chain_at(url: str, store: Path, lines: list[str], most_nodes: int = 64) -> AsyncIterator[Breaker]:
    alone = LocalLeases(**_TIMES)
    without_redis = Breaker(FileLeases(store, **_TIMES), alone, lines.append, **_SOON)
    redis = RedisLeases(url, "test", silence=1.0, **_TIMES)
    service = Breaker(redis, without_redis, lines.append, alone=alone, most_nodes=most_nodes, **_SOON)
    try:
        yield service
    finally:
        await service.close()


async def until(holds: Callable[[], object], seconds: float = BOUND) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


class Ill(LocalLeases):
    """A service that is away while it is `ill`; `bug` is an error in its probe that nobody foresaw."""

    ill, bug, probed = False, False, 0

    async def acquire(self, key: str, token: str, holder: str, *, void: str | None = None) -> Answer:
        if key.startswith("probe-"):
            self.probed += 1
            if self.bug:
                raise ZeroDivisionError("probe")
        if self.ill:
            raise LeaseUnavailable("it is ill")
        return await super().acquire(key, token, holder, void=void)


class TestABreakerAroundAHealthyRedis(LeaseConformance):
    @pytest.fixture(autouse=True)
    def server(self, shared_redis: RedisServer) -> None:
        self.shared_redis = shared_redis

    @asynccontextmanager
    async def open_service(self, **times: float) -> AsyncIterator[LeaseService]:
        lines: list[str] = []
        async with breaker_at(self.shared_redis.url, lines, uuid.uuid4().hex, **times) as service:
            yield service
            assert lines == []


async def test_a_silent_redis_costs_the_claims_of_that_moment_seconds_and_the_next_ones_nothing(
    redis_server: RedisServer,
) -> None:
    async with breaker_at(redis_server.url, []) as service:
        await won(service, "before")
        redis_server.pause()
        began = time.monotonic()
        await asyncio.gather(*(won(service, f"first {n}") for n in range(20)))  # they wait for one silence, together
        assert 0.9 < time.monotonic() - began < 2.0
        began = time.monotonic()
        for n in range(100):
            assert await (await won(service, f"k{n}")).release()
        assert time.monotonic() - began < 1.0
        redis_server.resume()


async def test_a_slow_answer_opens_nothing(redis_server: RedisServer) -> None:
    lines: list[str] = []
    async with breaker_at(redis_server.url, lines) as service:
        await won(service, "before")
        redis_server.pause()
        asyncio.get_running_loop().call_later(0.7, redis_server.resume)
        await won(service, "k")
        assert not lines


async def test_the_breaker_closes_when_the_server_is_back_and_may_open_again(redis_server: RedisServer) -> None:
    lines: list[str] = []
    async with breaker_at(redis_server.url, lines) as service:
        for round_ in (1, 2):
            redis_server.kill()
            lease = await won(service, some_key())
            assert service.open
            await asyncio.sleep(0.3)  # several probes
            assert service.open
            redis_server.start()
            await until(lambda: not service.open)
            assert len(lines) == 2 * round_
            assert "is back" in lines[-1]
            await lease.ready("m")
            assert await service.acquire(lease.key, "b", "host-b") == Ready("m"), "a fact is told where it is asked for"


async def test_who_may_not_subscribe_or_lease_is_not_taken_for_back(redis_server: RedisServer) -> None:
    """Else the breaker would close at every probe, and open at the next claim."""
    async with breaker_at(redis_server.url, []) as service:
        for what in ("subscribe", "evalsha"):
            redis_server.command("ACL", "SETUSER", "default", f"-{what}")
            redis_server.command("CLIENT", "KILL", "TYPE", "pubsub")
            async with service.watch("k"):
                await won(service, some_key())
            assert service.open, what
            await asyncio.sleep(0.4)
            assert service.open, what
            redis_server.command("ACL", "SETUSER", "default", f"+{what}")
            await until(lambda: not service.open)


async def test_nodes_are_between_two_services_for_some_seconds_after_a_change() -> None:
    first = Ill(**_TIMES)
    service = Breaker(first, LocalLeases(**_TIMES), lambda line: None, settles=0.5, **_SOON)
    assert service.settled
    first.ill = True
    await won(service, "k")
    assert not service.settled
    await until(lambda: service.settled)
    first.ill = False
    await until(lambda: not service.open)
    assert not service.settled
    await service.close()


async def test_a_waiter_goes_over_to_the_second_service_and_back(redis_server: RedisServer, store: Path) -> None:
    async with chain_at(redis_server.url, store, []) as service, chain_at(redis_server.url, store, []) as other:
        files = service._second._first  # type: ignore[attr-defined]
        await won(other, "k")
        waiter = await waiting(service, "k", "b")
        redis_server.kill()
        lease = await asyncio.wait_for(waiter, BOUND)  # the second knows nothing of the first's lease
        assert isinstance(lease, Lease)
        assert lease.grantor is files
        waiter = await waiting(service, "k", "c")
        redis_server.start()  # empty
        await until(lambda: not service.open)
        again = await asyncio.wait_for(waiter, BOUND)
        assert isinstance(again, Lease)
        assert again.grantor is service._first


async def test_a_watch_that_its_service_ends_goes_on_at_the_second_one() -> None:
    class Ends(LocalLeases):
        def watch(self, key: str) -> Watch:
            watch = super().watch(key)
            watch.changed = gone  # type: ignore[method-assign]
            return watch

    async def gone(timeout: float) -> bool:
        raise LeaseUnavailable("cannot subscribe")

    lines: list[str] = []
    service = Breaker(Ends(**_TIMES), LocalLeases(**_TIMES), lines.append)
    async with service.watch("k") as watch:
        assert await watch.changed(1.0), "ask again"
        assert service.open
        assert not await watch.changed(0.01)
    assert len(lines) == 1
    await service.close()


async def test_a_lease_is_not_called_lost_because_redis_is_and_is_taken_again_when_it_is_back(
    redis_server: RedisServer,
) -> None:
    async with breaker_at(redis_server.url, []) as service, breaker_at(redis_server.url, []) as other:
        lease = await won(service, "k")
        redis_server.kill()
        await won(service, "another")
        assert service.open
        assert await lease.renew()
        redis_server.start()
        await until(lambda: not service.open)
        assert await lease.renew()
        answer = await other.acquire("k", "b", "host-b")
        assert isinstance(answer, Wait)
        assert answer.holder == "host-a"


async def test_a_lease_of_the_second_service_lives_and_ends_there(redis_server: RedisServer, store: Path) -> None:
    async with chain_at(redis_server.url, store, []) as service:
        redis_server.kill()
        lease = await won(service, "k")
        assert [p.stem for p in store.glob("v2/leases/*/*.lease")] == ["k"]
        redis_server.start()
        await until(lambda: not service.open)
        assert await lease.renew()
        assert await lease.release()
        assert not list(store.glob("v2/leases/*/*.lease"))


async def test_an_end_of_a_lease_is_not_tried_at_a_server_that_is_away(redis_server: RedisServer) -> None:
    async with breaker_at(redis_server.url, []) as service:
        leases = [await won(service, f"k{n}") for n in range(10)]
        redis_server.pause()
        await won(service, "another")
        began = time.monotonic()
        for lease in leases[:5]:
            assert not await lease.release()
        for lease in leases[5:]:
            assert not await lease.fail("log", "where")
        assert time.monotonic() - began < 0.5
        redis_server.resume()


async def test_closing_an_open_breaker_leaves_no_task_behind(redis_server: RedisServer) -> None:
    before = asyncio.all_tasks()
    async with breaker_at(redis_server.url, []) as service:
        redis_server.kill()
        await won(service, "k")
        assert asyncio.all_tasks() > before
    assert asyncio.all_tasks() == before


async def test_an_error_in_a_probe_is_told_and_the_first_service_is_used_again_all_the_same() -> None:
    lines: list[str] = []
    first = Ill(**_TIMES)
    service = Breaker(first, LocalLeases(**_TIMES), lines.append, **_SOON)
    first.ill = first.bug = True
    await won(service, "k")
    await until(lambda: first.probed >= 3)
    assert service.open
    assert sum("please report it: ZeroDivisionError: probe" in line for line in lines) >= 2
    first.ill = first.bug = False
    await until(lambda: not service.open)
    await service.close()


# Three services: Redis, lease files, this node.


async def test_without_redis_agents_coordinate_by_lease_files(redis_server: RedisServer, store: Path) -> None:
    lines: list[str] = []
    async with chain_at(redis_server.url, store, lines) as one, chain_at(redis_server.url, store, []) as other:
        redis_server.kill()
        lease = await won(one, "k")
        assert isinstance(await other.acquire("k", "b", "host-b"), Wait)
        assert one.name == "lease files"
        assert len(lines) == 1
        assert "Redis cannot be used" in lines[0]
        assert lines[0].endswith("coordination is by lease files")
        waiter = await waiting(other, "k", "b")
        await lease.ready("m")
        assert await asyncio.wait_for(waiter, BOUND) == Ready("m")


async def test_many_nodes_without_redis_leave_the_store_alone(redis_server: RedisServer, store: Path) -> None:
    lines: list[str] = []
    async with (
        chain_at(redis_server.url, store, lines, most_nodes=2) as one,
        chain_at(redis_server.url, store, []) as two,
        chain_at(redis_server.url, store, []) as three,
    ):
        async with one.watch("k"), two.watch("k"), three.watch("k"):
            for n in range(2):  # a message says how many heard the one before
                await two.ready(f"k{n}", "m")
                await asyncio.sleep(0.1)
            await until(lambda: one._first.nodes == 3)
        redis_server.kill()
        await won(one, "k")
        assert one.name == "this node"
        assert lines[0].endswith("coordination is by this node")
        await won(two, "k", "b")
        assert two.name == "lease files"


@pytest.mark.parametrize("reaches", [True, False])
async def test_what_one_node_of_all_may_do_waits_while_the_service_does_not_reach_the_others(
    redis_server: RedisServer, reaches: bool
) -> None:
    async with breaker_at(redis_server.url, []) as service:
        for _ in range(2):  # the first finds out
            if not reaches:
                redis_server.kill()
            async with leased(service, "collection", "us.gc", 30.0) as may:
                assert may is reaches
            if not reaches:
                redis_server.restart()


async def test_each_breaker_of_a_chain_is_told_once_and_counted(redis_server: RedisServer, store: Path) -> None:
    lines: list[str] = []
    async with chain_at(redis_server.url, store, lines) as service:
        assert [(b["service"], b["state"], b["opened"]) for b in service.breakers()] == [
            ("Redis", "closed", 0),
            ("lease files", "closed", 0),
        ]
        redis_server.kill()
        await service.acquire("before", "t", "host")  # by lease files
        (store / "v2").rename(store / "away")
        answers = await asyncio.gather(*(service.acquire("k", f"t{n}", "host") for n in range(20)))
        assert sum(isinstance(a, Lease) for a in answers) == 1
        assert service.name == "this node"
        assert len(lines) == 2
        assert "lease files cannot be used" in lines[1]
        assert "create it, or mount it" in lines[1]
        assert lines[1].endswith("coordination is by this node")
        shown = status._coordinators({"coordinates": service.name, "breaker": service.breakers()})
        assert shown == "this node (Redis: away, 1×; lease files: away, 1×)"
        (store / "away").rename(store / "v2")
        await until(lambda: service.name == "lease files")
        redis_server.start()
        await until(lambda: not service.open)
        assert lines[2:] == ["coordination by lease files is back", "coordination by Redis is back"]
        assert [(b["state"], b["opened"], b["closed"]) for b in service.breakers()] == [("closed", 1, 1)] * 2
        assert "Redis" not in service.breakers()[1]["why"]
