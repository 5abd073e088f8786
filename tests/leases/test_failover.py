"""Redis first, this node's own leases while it is away."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kcoord.leases import failover
from kcoord.leases.base import LeaseService, Ready, Wait, Won
from kcoord.leases.failover import Failover
from kcoord.leases.local import LocalLeases
from kcoord.leases.redis import RedisLeases
from tests.leases.conformance import BOUND, TTL, LeaseConformance, bounded, eventually, some_key, waiting
from tests.redis_server import RedisServer

_TIMES = {"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0}


@asynccontextmanager
async def failover_at(
    url: str, lines: list[str], prefix: str = "kcoord:test", **times: float
) -> AsyncIterator[Failover]:
    times = {**_TIMES, **times}
    service = Failover(RedisLeases(url, prefix, **times), LocalLeases(**times), lines.append)
    try:
        yield service
    finally:
        await service.close()


async def until(service: Failover, *, is_open: bool) -> None:
    deadline = time.monotonic() + BOUND
    while service.open is not is_open:
        assert time.monotonic() < deadline, f"the breaker is still {'open' if service.open else 'closed'}"
        await asyncio.sleep(0.01)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe ten times a second: what is tested is that the probe finds out, not how long 2 s are."""
    monkeypatch.setattr(failover, "_PROBE_EVERY", 0.1)


class TestFailoverToAHealthyRedis(LeaseConformance):
    @pytest.fixture(autouse=True)
    def server(self, shared_redis: RedisServer) -> None:
        self.shared_redis = shared_redis

    @asynccontextmanager
    async def open_service(self, **times: float) -> AsyncIterator[LeaseService]:
        lines: list[str] = []
        async with failover_at(self.shared_redis.url, lines, f"kcoord:{uuid.uuid4().hex}", **times) as service:
            yield service
            assert lines == []


def test_the_breaker_opens_once_with_one_line_and_the_second_service_serves(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        lines: list[str] = []
        async with failover_at(redis_server.url, lines) as service:
            assert service.name == "Redis"
            redis_server.kill()
            answers = await asyncio.gather(*(service.acquire("k", f"t{n}", "host") for n in range(20)))
            assert sum(isinstance(a, Won) for a in answers) == 1
            assert sum(isinstance(a, Wait) for a in answers) == 19
            assert service.open
            assert service.name == "this node"
            assert len(lines) == 1
            assert "\n" not in lines[0]
            assert "Redis cannot be used" in lines[0]
            assert "this node" in lines[0]

    bounded(scenario())


def test_a_silent_redis_costs_one_claim_seconds_and_the_next_ones_nothing(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with failover_at(redis_server.url, []) as service:
            redis_server.pause()
            began = time.monotonic()
            assert isinstance(await service.acquire("k", "a", "host"), Won)  # this one pays for finding out
            assert time.monotonic() - began < 5.0
            began = time.monotonic()
            for n in range(100):
                assert isinstance(await service.acquire(f"k{n}", "a", "host"), Won)
            assert time.monotonic() - began < 1.0
            redis_server.resume()

    bounded(scenario())


@pytest.mark.usefixtures("soon")
def test_the_breaker_closes_when_the_server_is_back_and_may_open_again(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        lines: list[str] = []
        async with failover_at(redis_server.url, lines) as service:
            for round_ in (1, 2):
                redis_server.kill()
                key = some_key()
                assert isinstance(await service.acquire(key, "a", "host"), Won)
                assert service.open
                redis_server.start()
                await until(service, is_open=False)
                assert len(lines) == 2 * round_
                assert "is back" in lines[-1]
                await service.ready(key, "a", "m")
                assert redis_server.command("EXISTS", f"kcoord:test:lease:{key}") == b":1\r\n"

    bounded(scenario())


@pytest.mark.usefixtures("soon")
def test_the_breaker_stays_open_while_the_server_is_away(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        lines: list[str] = []
        async with failover_at(redis_server.url, lines) as service:
            redis_server.kill()
            await service.acquire("k", "a", "host")
            began = time.monotonic()
            while time.monotonic() - began < 0.5:  # several probes
                assert service.open
                await asyncio.sleep(0.02)
            assert len(lines) == 1

    bounded(scenario())


def test_a_waiter_goes_over_to_the_second_service(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with failover_at(redis_server.url, []) as service:
            await service.acquire("k", "a", "host-a")
            waiter = await waiting(service, "k", "b")
            redis_server.kill()
            assert isinstance(await asyncio.wait_for(waiter, BOUND), Won)  # the second knows nothing of a

    bounded(scenario())


def test_waiters_of_the_second_service_are_woken_at_once(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with failover_at(redis_server.url, []) as service:
            redis_server.kill()
            await service.acquire("k", "a", "host-a")
            waiter = await waiting(service, "k", "b")
            began = time.monotonic()
            await service.ready("k", "a", "m")
            assert await asyncio.wait_for(waiter, BOUND) == Ready("m")
            assert time.monotonic() - began < 1.5

    bounded(scenario())


def test_a_lease_is_not_called_lost_because_redis_is(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with failover_at(redis_server.url, []) as service:
            await service.acquire("k", "a", "host-a")
            redis_server.kill()
            assert await service.renew("k", "a")
            assert service.open
            assert await service.renew("k", "a")

    bounded(scenario())


def test_a_lease_of_the_second_service_is_kept_by_renewing(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with failover_at(redis_server.url, [], ttl=TTL) as service:
            redis_server.kill()
            await service.acquire("k", "a", "host-a")
            began = time.monotonic()
            while time.monotonic() - began < 1.7 * TTL:
                assert await service.renew("k", "a")
                assert isinstance(await service.acquire("k", "b", "host-b"), Wait)
                await asyncio.sleep(TTL / 10)

    bounded(scenario())


@pytest.mark.usefixtures("soon")
def test_a_lease_that_was_taken_meanwhile_is_known_to_redis_when_it_is_back(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        async with failover_at(redis_server.url, []) as service:
            redis_server.kill()
            await service.acquire("k", "a", "host-a")
            redis_server.start()
            await until(service, is_open=False)
            assert await service.renew("k", "a")
            assert isinstance(await service.acquire("k", "b", "host-b"), Wait)
            assert await service.release("k", "a")
            await eventually(lambda: service.acquire("k", "b", "host-b"), Won)

    bounded(scenario())


def test_closing_an_open_breaker_leaves_no_task_behind(redis_server: RedisServer) -> None:
    async def scenario() -> None:
        before = asyncio.all_tasks()
        async with failover_at(redis_server.url, []) as service:
            redis_server.kill()
            await service.acquire("k", "a", "host-a")
            assert asyncio.all_tasks() > before
        assert asyncio.all_tasks() == before

    bounded(scenario())
