"""Redis first; while it is away lease files, if there is a store; this node's own leases if nothing else is left."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kcoord.artifacts.store import Store
from kcoord.cli import status
from kcoord.errors import LeaseUnavailable
from kcoord.leases import failover
from kcoord.leases.base import Failed, Lease, LeaseService, Ready, Wait, Won
from kcoord.leases.failover import Failover
from kcoord.leases.files import FileLeases
from kcoord.leases.local import LocalLeases
from kcoord.leases.redis import RedisLeases
from kcoord.testing.leases import BOUND, TTL, LeaseConformance, eventually, some_key, waiting, won
from tests.support.redis_server import RedisServer

_TIMES = {"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0}


@asynccontextmanager
async def failover_at(url: str, lines: list[str], namespace: str = "test", **times: float) -> AsyncIterator[Failover]:
    times = {**_TIMES, **times}
    service = Failover(RedisLeases(url, namespace, **times), LocalLeases(**times), lines.append)
    try:
        yield service
    finally:
        await service.close()


async def until(service: Failover, *, is_open: bool) -> None:
    deadline = time.monotonic() + BOUND
    while service.open is not is_open:
        assert time.monotonic() < deadline, f"the breaker is still {'open' if service.open else 'closed'}"
        await asyncio.sleep(0.01)


async def agreed(service: Failover) -> None:
    deadline = time.monotonic() + BOUND
    while not service.agreed:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Probe ten times a second: what is tested is that the probe finds out, not how long 2 s are."""
    monkeypatch.setattr(failover, "_PROBE_EVERY", 0.1)


class Ill(LocalLeases):
    """A service with an error in it that nobody foresaw, in what is named by `fails`."""

    fails = ""
    asked = 0

    async def ping(self) -> None:
        self.asked += 1
        if self.fails == "ping":
            raise ZeroDivisionError("ping")

    async def take(self, lease: Lease, void: str | None) -> Won | Ready | Failed | Wait:
        if self.fails:
            raise LeaseUnavailable("it is ill")
        return await super().take(lease, void)

    async def renew(self, lease: Lease) -> bool:
        if self.fails == "renew":
            raise ZeroDivisionError("renew")
        return await super().renew(lease)


class TestFailoverToAHealthyRedis(LeaseConformance):
    @pytest.fixture(autouse=True)
    def server(self, shared_redis: RedisServer) -> None:
        self.shared_redis = shared_redis

    @asynccontextmanager
    async def open_service(self, **times: float) -> AsyncIterator[LeaseService]:
        lines: list[str] = []
        async with failover_at(self.shared_redis.url, lines, uuid.uuid4().hex, **times) as service:
            yield service
            assert lines == []


class TestFailoverWhoseFirstServiceIsAway(LeaseConformance):
    """This node's own leases serve, from before the first claim; none is known to be lost until the first service is back."""

    test_a_late_token_changes_nothing = None  # type: ignore[assignment]
    test_ready_from_a_token_that_lost_its_lease_is_accepted = None  # type: ignore[assignment]
    test_the_loss_of_a_lease_ends_its_renewals_and_nothing_else = None  # type: ignore[assignment]

    @asynccontextmanager
    async def open_service(self, **times: float) -> AsyncIterator[LeaseService]:
        first = Ill(**times)
        first.fails = "ping"
        service = Failover(first, LocalLeases(**times), lambda line: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failover, "_PROBE_EVERY", 60.0)
            service._trip(LeaseUnavailable("it is ill"))
            yield service
            assert service.open
            await service.close()


async def test_the_breaker_opens_once_with_one_line_and_the_second_service_serves(redis_server: RedisServer) -> None:
    lines: list[str] = []
    async with failover_at(redis_server.url, lines) as service:
        assert service.name == "Redis"
        redis_server.kill()
        answers = await asyncio.gather(*(service.acquire("k", f"t{n}", "host") for n in range(20)))
        assert sum(isinstance(a, Lease) for a in answers) == 1
        assert sum(isinstance(a, Wait) for a in answers) == 19
        assert service.open
        assert service.name == "this node"
        assert len(lines) == 1
        assert "\n" not in lines[0]
        assert "Redis cannot be used" in lines[0]
        assert "this node" in lines[0]


async def test_a_silent_redis_costs_one_claim_seconds_and_the_next_ones_nothing(redis_server: RedisServer) -> None:
    async with failover_at(redis_server.url, []) as service:
        redis_server.pause()
        began = time.monotonic()
        await won(service, "k")  # this one pays for finding out
        assert time.monotonic() - began < 5.0
        began = time.monotonic()
        for n in range(100):
            assert await (await won(service, f"k{n}")).release()
        assert time.monotonic() - began < 1.0
        redis_server.resume()


@pytest.mark.usefixtures("soon")
async def test_the_breaker_closes_when_the_server_is_back_and_may_open_again(redis_server: RedisServer) -> None:
    lines: list[str] = []
    async with failover_at(redis_server.url, lines) as service:
        for round_ in (1, 2):
            redis_server.kill()
            key = some_key()
            await won(service, key)
            assert service.open
            redis_server.start()
            await until(service, is_open=False)
            assert len(lines) == 2 * round_
            assert "is back" in lines[-1]
            await service.held[key, "a"].ready("m")
            assert redis_server.command("EXISTS", service._first._key(key)) == b":1\r\n"


@pytest.mark.usefixtures("soon")
async def test_nodes_agree_on_a_service_again_some_time_after_it_has_changed(
    redis_server: RedisServer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "_AGREED_AFTER", 0.5)
    async with chain_at(redis_server.url, store, []) as service:
        await service.ping()
        assert service.agreed
        redis_server.kill()
        await service.ping()
        assert service.open
        assert not service.agreed, "another node may still use Redis"
        await agreed(service)
        assert service.open, "all nodes use lease files"
        redis_server.start()
        await until(service, is_open=False)
        assert not service.agreed, "another node may still use lease files"
        await agreed(service)


@pytest.mark.usefixtures("soon")
async def test_nodes_that_each_coordinate_for_themselves_never_agree(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "_AGREED_AFTER", 0.0)
    async with failover_at(redis_server.url, []) as service:
        assert service.agreed
        redis_server.kill()
        await service.ping()
        assert service.open
        assert not service.agreed


@pytest.mark.usefixtures("soon")
async def test_the_breaker_stays_open_while_the_server_is_away(redis_server: RedisServer) -> None:
    lines: list[str] = []
    async with failover_at(redis_server.url, lines) as service:
        redis_server.kill()
        await won(service, "k")
        began = time.monotonic()
        while time.monotonic() - began < 0.5:  # several probes
            assert service.open
            await asyncio.sleep(0.02)
        assert len(lines) == 1


async def test_a_waiter_goes_over_to_the_second_service(redis_server: RedisServer) -> None:
    async with failover_at(redis_server.url, []) as service:
        await won(service, "k")
        waiter = await waiting(service, "k", "b")
        redis_server.kill()
        assert isinstance(await asyncio.wait_for(waiter, BOUND), Lease)  # the second knows nothing of a


async def test_waiters_of_the_second_service_are_woken_at_once(redis_server: RedisServer) -> None:
    async with failover_at(redis_server.url, []) as service:
        redis_server.kill()
        await won(service, "k")
        waiter = await waiting(service, "k", "b")
        began = time.monotonic()
        await service.held["k", "a"].ready("m")
        assert await asyncio.wait_for(waiter, BOUND) == Ready("m")
        assert time.monotonic() - began < 1.5


async def test_a_lease_is_not_called_lost_because_redis_is(redis_server: RedisServer) -> None:
    async with failover_at(redis_server.url, []) as service:
        await won(service, "k")
        redis_server.kill()
        assert await service.held["k", "a"].renew()
        assert service.open
        assert await service.held["k", "a"].renew()


async def test_a_lease_of_the_second_service_is_kept_by_renewing(redis_server: RedisServer) -> None:
    async with failover_at(redis_server.url, [], ttl=TTL) as service:
        redis_server.kill()
        await won(service, "k")
        began = time.monotonic()
        while time.monotonic() - began < 1.7 * TTL:
            assert await service.held["k", "a"].renew()
            assert isinstance(await service.acquire("k", "b", "host-b"), Wait)
            await asyncio.sleep(TTL / 10)


@pytest.mark.usefixtures("soon")
async def test_a_lease_that_was_taken_meanwhile_is_known_to_redis_when_it_is_back(redis_server: RedisServer) -> None:
    async with failover_at(redis_server.url, []) as service:
        redis_server.kill()
        await won(service, "k")
        redis_server.start()
        await until(service, is_open=False)
        assert await service.held["k", "a"].renew()
        assert isinstance(await service.acquire("k", "b", "host-b"), Wait)
        assert await service.held["k", "a"].release()
        await eventually(lambda: service.acquire("k", "b", "host-b"), Lease)


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    "leased", ["before it hung", "after nobody waited for it", "to one who was told that it is ready"]
)
async def test_what_has_ended_while_redis_hung_keeps_nobody_waiting_when_it_is_back(
    redis_server: RedisServer, leased: str
) -> None:
    """It holds what it leased before, and then does what it was sent though its client has gone: nobody will renew either."""
    other = RedisLeases(redis_server.url, "test", **_TIMES)
    async with failover_at(redis_server.url, []) as service:
        await won(service, "before")
        if leased == "before it hung":
            await won(service, "k")
            redis_server.pause()
            await service.held["before", "a"].release()  # finds out
        elif leased == "after nobody waited for it":
            redis_server.pause()
            await won(service, "k")
        else:
            redis_server.pause()
            await service._second.ready("k", "m")
            assert await service.acquire("k", "a", "host-a") == Ready("m")
        if "ready" not in leased:
            await service.held["k", "a"].release()
        redis_server.resume()
        await until(service, is_open=False)
        await won(other, "k", "c")
    await other.close()


async def test_closing_an_open_breaker_leaves_no_task_behind(redis_server: RedisServer) -> None:
    before = asyncio.all_tasks()
    async with failover_at(redis_server.url, []) as service:
        redis_server.kill()
        await won(service, "k")
        assert asyncio.all_tasks() > before
    assert asyncio.all_tasks() == before


@pytest.mark.usefixtures("soon")
async def test_an_error_in_a_probe_is_told_and_the_first_service_is_used_again_all_the_same() -> None:
    lines: list[str] = []
    first = Ill(**_TIMES)
    service = Failover(first, LocalLeases(**_TIMES), lines.append)
    first.fails = "ping"
    await won(service, "k")
    while first.asked < 3:
        await asyncio.sleep(0.01)
    assert service.open
    assert sum("please report it: ZeroDivisionError: ping" in line for line in lines) >= 2
    first.fails = ""
    await until(service, is_open=False)
    first.fails = "ping"
    await won(service, "k2")
    before = asyncio.all_tasks()
    await service.close()
    assert len(asyncio.all_tasks()) < len(before), "its probe ends with it"


@pytest.mark.usefixtures("soon")
async def test_an_error_in_making_leases_known_is_told_and_holds_up_no_command() -> None:
    lines: list[str] = []
    first, second = Ill(**_TIMES), Ill(**_TIMES)
    service = Failover(first, second, lines.append)
    await won(service, "k")
    first.fails = "ping"
    second.fails = "renew"
    with pytest.raises(LeaseUnavailable):
        await won(service, "k2")
    assert any("please report it: ZeroDivisionError: renew" in line for line in lines)
    first.fails = second.fails = ""
    await until(service, is_open=False)
    await service.close()


async def test_an_error_in_the_trial_of_a_redis_is_told_and_the_next_lease_tries_it_again(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    service = RedisLeases(redis_server.url, "test", **_TIMES, tell=lines.append)

    async def ill() -> None:
        await asyncio.sleep(0.05)
        raise ZeroDivisionError("ping")

    with monkeypatch.context() as patch:
        patch.setattr(service, "ping", ill)
        gone = asyncio.create_task(service.acquire("k", "a", "host"))
        await asyncio.sleep(0)
        gone.cancel()  # whoever would have heard of it
        while not lines:
            await asyncio.sleep(0.01)
    assert "please report it: ZeroDivisionError: ping" in lines[0]
    await won(service, "k")
    await service.close()


# Three services: Redis, lease files, this node.


@pytest.fixture
def store(tmp_path: Path) -> Path:
    Store(tmp_path / "store").open()
    return tmp_path / "store"


@asynccontextmanager
async def chain_at(url: str, store: Path, lines: list[str], **times: float) -> AsyncIterator[Failover]:
    times = {**_TIMES, **times}
    without_redis = Failover(FileLeases(store, **times), LocalLeases(**times), lines.append)
    service = Failover(RedisLeases(url, "test", **times), without_redis, lines.append)
    try:
        yield service
    finally:
        await service.close()


def markers(store: Path) -> list[str]:
    return [p.stem for p in store.glob("v2/leases/*/*.lease")]


async def until_there(store: Path, key: str) -> None:
    deadline = time.monotonic() + BOUND
    while key not in markers(store):
        assert time.monotonic() < deadline, "nobody made the lease known"
        await asyncio.sleep(0.01)


async def test_without_redis_agents_coordinate_by_lease_files(redis_server: RedisServer, store: Path) -> None:
    lines: list[str] = []
    async with chain_at(redis_server.url, store, lines) as one, chain_at(redis_server.url, store, []) as other:
        redis_server.kill()
        await won(one, "k")
        assert isinstance(await other.acquire("k", "b", "host-b"), Wait)
        assert one.name == "lease files"
        assert len(lines) == 1
        assert "Redis cannot be used" in lines[0]
        assert lines[0].endswith("coordination is by lease files")
        waiter = await waiting(other, "k", "b")
        await one.held["k", "a"].ready("m")
        assert await asyncio.wait_for(waiter, BOUND) == Ready("m")


async def test_what_an_agent_holds_is_made_known_in_lease_files_as_soon_as_redis_is_lost(
    redis_server: RedisServer, store: Path
) -> None:
    async with chain_at(redis_server.url, store, []) as one, chain_at(redis_server.url, store, []) as other:
        for key in ("held", "ended"):
            await won(one, key)
        await one.held["ended", "a"].release()
        redis_server.kill()
        await won(one, "another")  # finds out
        await until_there(store, "held")
        assert isinstance(await other.acquire("held", "b", "host-b"), Wait)
        await won(other, "ended", "b")
        assert await one.held["held", "a"].renew()
        assert await one.held["held", "a"].release()
        await won(other, "held", "b")


async def test_redis_that_is_back_costs_no_second_leader(redis_server: RedisServer, store: Path) -> None:
    """One agent leads since Redis was away, the other asks all the time: before, during and after Redis comes back."""
    async with chain_at(redis_server.url, store, []) as one, chain_at(redis_server.url, store, []) as other:
        redis_server.kill()
        await won(one, "k")
        assert isinstance(await other.acquire("k", "b", "host-b"), Wait)
        redis_server.start()
        started, after = time.monotonic(), 0
        while after < 5:
            assert isinstance(await other.acquire("k", "b", "host-b"), Wait)
            assert time.monotonic() - started < 10.0, "Redis does not coordinate again within 10 s"
            after += not (one.open or other.open)
            await asyncio.sleep(0.02)
        assert one.name == other.name == "Redis"
        assert await one.held["k", "a"].renew()
        await one.held["k", "a"].ready("m")
        assert markers(store) == [], "a lease was left in the files"
        assert (await eventually(lambda: other.acquire("k", "b", "host-b"), Ready)).manifest == "m"


@pytest.mark.usefixtures("soon")
async def test_a_lease_that_went_back_to_redis_ends_in_the_files_by_its_ttl(
    redis_server: RedisServer, store: Path
) -> None:
    async with chain_at(redis_server.url, store, [], ttl=1.0) as service:
        redis_server.kill()
        await won(service, "k")
        redis_server.start()
        deadline = time.monotonic() + BOUND
        while markers(store) or service.open:
            assert await service.held["k", "a"].renew()
            assert time.monotonic() < deadline, "the files still have it"
            await asyncio.sleep(0.05)
        assert isinstance(await service.acquire("k", "b", "host-b"), Wait)
        redis_server.kill()
        assert await service.held["k", "a"].renew()
        await until_there(store, "k")  # Redis lost once more: and made known once more


@pytest.mark.parametrize("periods", [(1.0, 0.7), (0.7, 1.0)])
async def test_who_finds_redis_back_first_leaves_time_for_the_others_to_make_their_leases_known(
    shared_redis: RedisServer, store: Path, monkeypatch: pytest.MonkeyPatch, periods: tuple[float, float]
) -> None:
    async with chain_at(shared_redis.url, store, []) as one, chain_at(shared_redis.url, store, []) as other:
        for service, period in zip((one, other), periods, strict=True):
            monkeypatch.setattr(failover, "_PROBE_EVERY", period)
            service._trip(LeaseUnavailable("its cable was pulled, and is back"))
            await asyncio.sleep(0)  # its probe begins
        key = some_key()
        await won(one, key)
        deadline = time.monotonic() + BOUND
        while one.open or other.open:
            assert isinstance(await other.acquire(key, "b", "host-b"), Wait)
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        assert isinstance(await other.acquire(key, "b", "host-b"), Wait)


async def test_while_agents_come_back_to_redis_one_by_one_they_give_no_key_to_two(
    shared_redis: RedisServer, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with chain_at(shared_redis.url, store, []) as one, chain_at(shared_redis.url, store, []) as other:
        pings, come_back, ping = itertools.count(1), asyncio.Event(), other._first.ping
        probed_again = asyncio.Event()

        async def slow_ping() -> None:
            if next(pings) == 2:
                probed_again.set()
                await come_back.wait()
            await ping()

        monkeypatch.setattr(failover, "_PROBE_EVERY", 0.05)
        monkeypatch.setattr(other._first, "ping", slow_ping)
        for service in (one, other):
            service._trip(LeaseUnavailable("its cable was pulled, and is back"))
        deadline = time.monotonic() + BOUND
        while one.open or not probed_again.is_set():
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        here, there = some_key(), some_key()
        await won(one, here)
        assert isinstance(await other.acquire(here, "b", "host-b"), Wait)
        await won(other, there, "b")
        assert isinstance(await one.acquire(there, "a", "host-a"), Wait)
        assert other.open
        assert there in markers(store), "others may still look there"
        assert here not in markers(store), "what the other one has been refused it does not keep"
        await one.held[here, "a"].ready("m")
        assert (await eventually(lambda: other.acquire(here, "b", "host-b"), Ready)).manifest == "m"
        await other.held[there, "b"].ready("m")
        assert (await eventually(lambda: one.acquire(there, "a", "host-a"), Ready)).manifest == "m"
        come_back.set()


@pytest.mark.usefixtures("soon")
async def test_a_waiter_follows_from_redis_to_the_files_and_back(redis_server: RedisServer, store: Path) -> None:
    async with chain_at(redis_server.url, store, []) as service:
        files = service._second._first  # type: ignore[attr-defined]

        async def until_watched(*, in_files: bool) -> None:
            deadline = time.monotonic() + BOUND
            while bool("k" in files._keys and files._keys["k"].events) is not in_files:
                assert time.monotonic() < deadline, "the waiter watches the wrong service"
                await asyncio.sleep(0.01)

        await won(service, "k")
        waiter = await waiting(service, "k", "b")
        await until_watched(in_files=False)
        redis_server.kill()
        await won(service, "another")
        await until_there(store, "k")
        await until_watched(in_files=True)
        redis_server.start()
        await until(service, is_open=False)
        await until_watched(in_files=False)
        assert not waiter.done()
        await service.held["k", "a"].ready("m")
        assert await asyncio.wait_for(waiter, BOUND) == Ready("m")


@pytest.mark.usefixtures("soon")
async def test_each_breaker_of_a_chain_is_told_once_and_counted(redis_server: RedisServer, store: Path) -> None:
    lines: list[str] = []
    async with chain_at(redis_server.url, store, lines) as service:
        assert [(b["service"], b["state"], b["opened"]) for b in service.breakers()] == [
            ("Redis", "closed", 0),
            ("lease files", "closed", 0),
        ]
        redis_server.kill()
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
        deadline = time.monotonic() + BOUND
        while service.name != "lease files":
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        redis_server.start()
        await until(service, is_open=False)
        assert lines[2:] == ["coordination by lease files is back", "coordination by Redis is back"]
        assert [(b["state"], b["opened"], b["closed"]) for b in service.breakers()] == [("closed", 1, 1)] * 2
        assert "Redis" not in service.breakers()[1]["why"]
