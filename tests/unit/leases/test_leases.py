"""Leases of one node, and leases in a real Redis."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest

from kcoord.errors import LeaseUnavailable
from kcoord.leases.base import Lease, LeaseService, Ready, Wait, await_turn, probe, within
from kcoord.leases.local import LocalLeases
from kcoord.leases.redis import RedisLeases
from kcoord.testing.leases import BOUND, LeaseConformance, some_key, waiting, won
from tests.support.redis_server import RedisServer

_ANSWERS_WITHIN = 5.0  # seconds; a dead or silent server is told apart from a slow one by then
_REFUSED_WITHIN = 1.0
_SILENCE = 1.0  # seconds without an answer


class TestLocalLeases(LeaseConformance):
    @asynccontextmanager
    async def open_service(self, **times: float) -> AsyncIterator[LeaseService]:
        service = LocalLeases(**times)
        yield service
        await service.close()
        assert not service._watchers, "a watch was left behind"


async def test_outcomes_are_forgotten_oldest_first_and_memory_is_bounded() -> None:
    service = LocalLeases(15.0, 900.0, 30.0)
    for n in range(10_050):
        await service.ready(f"k{n}", "m")
    assert len(service._outcomes) == 10_000
    await won(service, "k0", "b")
    assert await service.acquire("k10049", "b", "host") == Ready("m")


async def test_a_cancellation_that_arrives_as_the_work_ends_is_not_swallowed() -> None:
    """`asyncio.wait_for` swallows it before Python 3.12: a cancelled claim then went on waiting."""
    for steps in range(10):
        work: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(within(5.0, work))
        for _ in range(steps):
            await asyncio.sleep(0)
        work.set_result("done")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


@asynccontextmanager
async def leases_at(url: str, namespace: str = "test", **times: float) -> AsyncIterator[RedisLeases]:
    service = RedisLeases(url, namespace, **{"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0, **times})
    try:
        yield service
    finally:
        await service.close()


class TestRedisLeases(LeaseConformance):
    @pytest.fixture(autouse=True)
    def server(self, shared_redis: RedisServer) -> None:
        self.shared_redis = shared_redis

    @asynccontextmanager
    async def open_service(self, **times: float) -> AsyncIterator[LeaseService]:
        async with leases_at(self.shared_redis.url, uuid.uuid4().hex, **times) as service:
            yield service
            assert not service._watchers, "a watch was left behind"


async def test_namespaces_are_kept_apart(shared_redis: RedisServer) -> None:
    async with leases_at(shared_redis.url, "one") as one, leases_at(shared_redis.url, "two") as two:
        key = some_key()
        await won(one, key)
        await won(two, key, "b")


async def test_scripts_that_the_server_forgot_are_sent_again(shared_redis: RedisServer) -> None:
    async with leases_at(shared_redis.url) as service:
        key = some_key()
        a = await won(service, key)
        for command in (
            lambda: a.renew(),
            lambda: service.acquire(key, "b", "host-b"),
            lambda: a.fail("log", "where"),
        ):
            shared_redis.command("SCRIPT", "FLUSH")
            assert await command()


async def test_a_silent_server_is_given_up_within_seconds_by_every_command(redis_server: RedisServer) -> None:
    async with (
        leases_at(redis_server.url, silence=_SILENCE) as service,
        leases_at(redis_server.url, silence=_SILENCE) as new,
    ):
        await won(service, "k", "other")
        held, failing, released = [await won(service, key) for key in ("held", "failing", "released")]

        async def outcome(command: Awaitable[object]) -> tuple[type[BaseException] | None, bool]:
            began = time.monotonic()
            try:
                await command
            except Exception as error:  # noqa: BLE001 - whatever it is, it is compared below
                return type(error), time.monotonic() - began < _ANSWERS_WITHIN
            return None, time.monotonic() - began < _ANSWERS_WITHIN

        redis_server.pause()
        commands = {
            "acquire": service.acquire("k", "a", "host"),
            "renew": held.renew(),
            "ready": service.ready("another", "m"),
            "fail": failing.fail("log", "where"),
            "release": released.release(),
            "probe": probe(service),
            "await_turn": await_turn(service, "k", "a", "host"),
            "watch": new.watch("k").__aenter__(),
        }
        outcomes = await asyncio.gather(*(outcome(c) for c in commands.values()))
        assert dict(zip(commands, outcomes, strict=True)) == dict.fromkeys(commands, (LeaseUnavailable, True))
        redis_server.resume()
        assert isinstance(await service.acquire("k", "a", "host"), Wait)


async def test_a_server_that_falls_silent_under_a_waiter_is_given_up_within_seconds(redis_server: RedisServer) -> None:
    async with leases_at(redis_server.url, silence=_SILENCE) as service:
        await won(service, "k")
        waiter = await waiting(service, "k", "b")
        redis_server.pause()
        began = time.monotonic()
        with pytest.raises(LeaseUnavailable):
            await asyncio.wait_for(waiter, BOUND)
        assert time.monotonic() - began < 2.2 + _ANSWERS_WITHIN  # the re-check, then one command
        redis_server.resume()


async def test_a_server_that_is_gone_is_told_at_once(redis_server: RedisServer) -> None:
    async with leases_at(redis_server.url) as service:
        await probe(service)
        redis_server.stop()
        began = time.monotonic()
        for command in (lambda: probe(service), lambda: service.acquire("k", "a", "host")):
            with pytest.raises(LeaseUnavailable):
                await command()
        with pytest.raises(LeaseUnavailable):
            async with service.watch("k"):
                pass
        assert time.monotonic() - began < _REFUSED_WITHIN


async def test_waiters_are_answered_after_a_restart(redis_server: RedisServer) -> None:
    """An empty server is a free key: of the waiters one leads, the others hear that it is ready."""
    async with leases_at(redis_server.url) as service:
        await won(service, "k")

        async def claim(token: str, waits: asyncio.Event) -> object:
            answer = await await_turn(service, "k", token, token, stays=lambda wait: waits.set() is None)
            if isinstance(answer, Lease):
                await answer.ready("m")
            return answer

        told = [asyncio.Event() for _ in range(10)]
        claims = [asyncio.create_task(claim(f"w{n}", waits)) for n, waits in enumerate(told)]
        await asyncio.wait_for(asyncio.gather(*(waits.wait() for waits in told)), BOUND)
        redis_server.restart()
        answers = await asyncio.wait_for(asyncio.gather(*claims), BOUND)
        assert sum(isinstance(a, Lease) for a in answers) == 1
        assert sum(a == Ready("m") for a in answers) == 9


async def test_a_wrong_password_is_told_and_not_shown() -> None:
    with RedisServer(tcp=True, password="right-horse") as server:
        async with leases_at(server.url) as service:
            await won(service, "k")
        async with leases_at(server.url.replace("right-horse", "wrong-donkey")) as service:
            with pytest.raises(LeaseUnavailable) as caught:
                await won(service, "k")
            assert "donkey" not in str(caught.value)
            with pytest.raises(LeaseUnavailable):
                await probe(service)
            with pytest.raises(LeaseUnavailable):
                async with service.watch("k"):
                    pass


async def test_no_key_stays_for_ever(shared_redis: RedisServer) -> None:
    async with leases_at(shared_redis.url) as service:
        for end in ("lease", "ready", "fail", "release"):
            key = some_key()
            a = await won(service, key)
            if end == "ready":
                await a.ready("m")
            elif end == "fail":
                await a.fail("log", "where")
            elif end == "release":
                await a.release()
            left = int(shared_redis.command("PTTL", service._key(key))[1:].strip())
            assert left == -2 if end == "release" else 0 < left <= 7 * 86400 * 1000, end


async def test_an_error_that_ends_a_renewal_is_logged_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Ill(LocalLeases):
        async def renew(self, lease: Lease) -> bool:
            raise ZeroDivisionError("renew")

    service = Ill(0.06, 900.0, 30.0)
    a = await won(service, "k")
    a.keep_alive(0.06)
    while not caplog.records:
        await asyncio.sleep(0.01)
    assert await a.release()
    (record,) = caplog.records
    assert "please report it" in record.getMessage()
    assert record.exc_info
