"""The conformance suite of a lease service: inherit `LeaseConformance`, give it `open_service`, and run it with pytest.

Times are short and real: `TTL` is long enough that a busy machine does not reach it within a handful of commands, and short
enough to wait for.
"""

from __future__ import annotations

import asyncio
import functools
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from kcoord.leases.base import Answer, Failed, Lease, LeaseService, Ready, Unleased, Wait, await_turn, probe

TTL = 0.4
LIMIT = 0.8
FAILURE_TTL = 0.4
BOUND = 8.0  # seconds; no scenario takes longer, unless something hangs
AT_ONCE = 0.2  # seconds; far below `await_turn`'s re-check, so only a wake-up is this fast

Open = Callable[..., AbstractAsyncContextManager[LeaseService]]
Scenario = Callable[[Any, LeaseService], Coroutine[Any, Any, None]]


def bounded(scenario: Coroutine[Any, Any, None], seconds: float = 60.0) -> None:
    """Run a scenario to its end, or fail: nothing may hang."""
    asyncio.run(asyncio.wait_for(scenario, seconds))


def some_key() -> str:
    return uuid.uuid4().hex


async def eventually(
    ask: Callable[[], Awaitable[Answer]], kind: type[Answer], seconds: float = BOUND, every: float = 0.01
) -> Any:
    """Ask until the answer is of `kind`."""
    deadline = time.monotonic() + seconds
    while not isinstance(answer := await ask(), kind):
        assert time.monotonic() < deadline, f"still {answer} after {seconds} s"
        await asyncio.sleep(every)
    return answer


async def won(service: LeaseService, key: str, token: str = "a", *, void: str | None = None) -> Lease:
    """The lease of `key`, which is free, for ``host-<token>``."""
    answer = await service.acquire(key, token, f"host-{token}", void=void)
    assert isinstance(answer, Lease), answer
    return answer


async def waiting(
    service: LeaseService, key: str, token: str
) -> asyncio.Task[Lease | Unleased | Ready | Failed | None]:
    """A claim that is known to wait: it has subscribed, asked, and been told to wait."""
    waits = asyncio.Event()

    def stays(wait: Wait) -> bool:
        waits.set()
        return True

    task = asyncio.create_task(await_turn(service, key, token, token, stays=stays))
    await asyncio.wait_for(waits.wait(), BOUND)
    return task


def with_times(**times: float) -> Callable[[Scenario], Callable[[LeaseConformance], None]]:
    """Makes a test of a scenario, which gets a fresh service with these times, in seconds."""

    def decorate(scenario: Scenario) -> Callable[[LeaseConformance], None]:
        def test(self: LeaseConformance) -> None:
            async def opened() -> None:
                async with self.open_service(**{"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0, **times}) as service:
                    await scenario(self, service)

            bounded(opened())

        functools.update_wrapper(test, scenario)
        del test.__wrapped__  # type: ignore[attr-defined]  # pytest would take its parameters for fixtures
        return test

    return decorate


class LeaseConformance:
    """Scenarios. ``open_service(ttl=…, limit=…, failure_ttl=…)`` is an async context manager for a fresh service with these
    times, in seconds."""

    open_service: Open

    @with_times()
    async def test_a_free_key_is_won_and_a_second_claim_waits_for_its_holder(self, service: LeaseService) -> None:
        key, other = some_key(), some_key()
        await won(service, key)
        await (await won(service, other)).ready("m")
        answer = await service.acquire(key, "b", "host-b")
        assert isinstance(answer, Wait)
        assert answer.holder == "host-a"
        assert 20 < answer.ttl <= 30

    @with_times()
    async def test_asking_again_with_the_same_token_gives_the_same_lease(self, service: LeaseService) -> None:
        key = some_key()
        await won(service, key)
        again = await won(service, key)
        assert isinstance(await service.acquire(key, "b", "host-b"), Wait)
        assert await again.renew()

    @with_times()
    async def test_ready_is_told_to_everybody_and_may_be_said_twice(self, service: LeaseService) -> None:
        key = some_key()
        a = await won(service, key)
        await a.ready("manifest-1")
        await a.ready("manifest-1")
        await service.ready(key, "manifest-1")
        for token in ("a", "b", "c"):
            assert await service.acquire(key, token, "host") == Ready("manifest-1")

    @with_times()
    async def test_an_untrue_ready_is_forgotten_and_another_that_came_meanwhile_is_not(
        self, service: LeaseService
    ) -> None:
        key = some_key()
        a = await won(service, key)
        await a.ready("gone")
        assert await service.acquire(key, "b", "host-b", void="older") == Ready("gone")
        await won(service, key, "b", void="gone")
        assert isinstance(await service.acquire(key, "c", "host-c"), Wait)

    @with_times(failure_ttl=FAILURE_TTL)
    async def test_a_failure_is_told_with_its_log_for_its_whole_time_and_then_forgotten(
        self, service: LeaseService
    ) -> None:
        key = some_key()
        a = await won(service, key)
        began = time.monotonic()
        assert await a.fail("ptxas: no", "host-a, rank 3")
        assert await service.acquire(key, "b", "host-b") == Failed("ptxas: no", "host-a, rank 3")
        await eventually(lambda: service.acquire(key, "b", "host-b"), Lease)
        assert time.monotonic() - began > 0.7 * FAILURE_TTL

    @with_times()
    async def test_a_log_of_any_characters_and_length_comes_through(self, service: LeaseService) -> None:
        for log in ("", "\0\r\n", "ünïcödé → 編譯", "x" * 100_000 + "the end"):
            key = some_key()
            a = await won(service, key)
            assert await a.fail(log, "w")
            answer = await service.acquire(key, "b", "host-b")
            assert isinstance(answer, Failed)
            assert answer.log[-7:] == log[-7:]

    @with_times()
    async def test_a_released_lease_is_free_and_a_late_renewal_does_not_take_it(self, service: LeaseService) -> None:
        key = some_key()
        a = await won(service, key)
        assert await a.release()
        await a.renew()
        await won(service, key, "b")

    @with_times(ttl=TTL, limit=300.0)
    async def test_a_waiter_takes_over_after_the_ttl_when_the_holder_dies_silently(self, service: LeaseService) -> None:
        key = some_key()
        began = time.monotonic()
        await won(service, key)
        answer = await asyncio.wait_for(await_turn(service, key, "b", "host-b"), BOUND)
        assert isinstance(answer, Lease)
        assert time.monotonic() - began > 0.7 * TTL

    @with_times(ttl=TTL, limit=300.0)
    async def test_a_lease_that_is_kept_alive_is_renewed_until_it_is_given_up(self, service: LeaseService) -> None:
        key, before = some_key(), asyncio.all_tasks()
        a = await won(service, key)
        began = time.monotonic()
        a.keep_alive(TTL)
        while time.monotonic() - began < 1.7 * TTL:
            assert isinstance(await service.acquire(key, "b", "host-b"), Wait)
            await asyncio.sleep(TTL / 10)
        renewing = asyncio.all_tasks() - before
        await a.release()
        assert all(task.done() for task in renewing if task.get_coro().__name__ == "_keep")  # type: ignore[union-attr]
        await won(service, key, "b")

    @with_times()
    async def test_a_lease_is_given_up_at_once_however_seldom_it_is_renewed(self, service: LeaseService) -> None:
        lease = await won(service, some_key())
        lease.keep_alive(10 * BOUND)
        await asyncio.sleep(0)  # its renewals begin
        assert await asyncio.wait_for(lease.release(), BOUND)

    @with_times()
    async def test_a_service_that_works_passes_its_probe_as_often_as_it_is_asked(self, service: LeaseService) -> None:
        for _ in range(3):
            await probe(service)

    @with_times()
    async def test_the_loss_of_a_lease_ends_its_renewals_and_nothing_else(self, service: LeaseService) -> None:
        key, renewed = some_key(), []
        a = await won(service, key)
        renew = service.renew

        async def counted(lease: Lease) -> bool:
            renewed.append(await renew(lease))
            return renewed[-1]

        service.renew = counted  # type: ignore[method-assign]
        a.keep_alive(0.06)
        await service.ready(key, "m")
        deadline = time.monotonic() + BOUND
        while False not in renewed:
            assert time.monotonic() < deadline, "it does not hear that it is lost"
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # time for several renewals
        assert renewed.count(False) == 1
        assert await service.acquire(key, "b", "host") == Ready("m")

    @with_times(ttl=TTL, limit=LIMIT)
    async def test_the_hard_limit_ends_a_lease_that_is_renewed_and_then_anybody_may_have_a_new_one(
        self, service: LeaseService
    ) -> None:
        for token in ("a", "b"):
            key = some_key()
            began = time.monotonic()
            a = await won(service, key)
            while await a.renew():
                assert time.monotonic() - began < BOUND, "the limit is not enforced"
                await asyncio.sleep(TTL / 10)
            assert time.monotonic() - began > 0.7 * LIMIT
            # the service's own limit began as the claim got there: it may last for the rest of a millisecond
            again = await eventually(functools.partial(service.acquire, key, token, "host"), Lease, every=0.002)
            while not await again.renew():
                again = await eventually(functools.partial(service.acquire, key, token, "host"), Lease, every=0.002)
            assert isinstance(await service.acquire(key, "c", "host-c"), Wait)

    @with_times(ttl=TTL, limit=300.0)
    async def test_a_token_that_lost_its_lease_changes_nothing_but_its_ready_is_accepted(
        self, service: LeaseService
    ) -> None:
        key = some_key()
        late = await won(service, key, "late")
        b = await eventually(lambda: service.acquire(key, "b", "host-b"), Lease)
        assert not await late.renew()
        assert not await late.fail("log", "where")
        assert not await late.release()
        answer = await service.acquire(key, "c", "host-c")
        assert isinstance(answer, Wait)
        assert answer.holder == "host-b"
        assert await b.renew()
        await late.ready("m")
        assert await service.acquire(key, "c", "host-c") == Ready("m")
        assert not await b.renew()
        assert not await b.fail("log", "where")
        assert await service.acquire(key, "c", "host-c") == Ready("m")

    @with_times()
    async def test_a_claim_that_is_cancelled_at_any_moment_holds_nothing(self, service: LeaseService) -> None:
        for steps in range(40):
            key = some_key()
            claim = asyncio.create_task(service.acquire(key, "a", "host-a"))
            await _steps(steps)
            claim.cancel()
            (found,) = await asyncio.gather(claim, return_exceptions=True)
            if isinstance(found, Lease):
                await found.release()
            await eventually(functools.partial(service.acquire, key, "b", "host-b"), Lease)

    @with_times()
    async def test_every_end_of_a_lease_wakes_its_waiter_at_once(self, service: LeaseService) -> None:
        ends: list[tuple[Callable[[Lease], Awaitable[object]], type[Answer]]] = [
            (lambda lease: lease.release(), Lease),
            (lambda lease: lease.ready("m"), Ready),
            (lambda lease: lease.fail("log", "where"), Failed),
        ]
        for end, kind in ends:
            took = []
            for _ in range(5):
                key = some_key()
                a = await won(service, key)
                waiter = await waiting(service, key, "b")
                began = time.monotonic()
                await end(a)
                assert isinstance(await asyncio.wait_for(waiter, BOUND), kind)
                took.append(time.monotonic() - began)
            assert min(took) < AT_ONCE, f"woken after {took} s"

    @with_times()
    async def test_a_hundred_waiters_of_one_key_hear_that_it_is_ready(self, service: LeaseService) -> None:
        key = some_key()
        a = await won(service, key)
        waiters = [await waiting(service, key, f"w{n}") for n in range(100)]
        await a.ready("m")
        answers = await asyncio.wait_for(asyncio.gather(*waiters), BOUND)
        assert set(answers) == {Ready("m")}

    @with_times()
    async def test_of_many_simultaneous_claims_one_is_won(self, service: LeaseService) -> None:
        key = some_key()
        answers = await asyncio.gather(*(service.acquire(key, f"t{n}", "host") for n in range(300)))
        assert sum(isinstance(a, Lease) for a in answers) == 1
        assert sum(isinstance(a, Wait) for a in answers) == 299

    @with_times()
    async def test_waiters_lead_one_after_the_other_and_never_two_at_once(self, service: LeaseService) -> None:
        key, leading, led = some_key(), 0, []

        async def claim(token: str) -> None:
            nonlocal leading
            lease = await await_turn(service, key, token, token)
            assert isinstance(lease, Lease)
            leading += 1
            assert leading == 1, "two leaders at once"
            await asyncio.sleep(random.uniform(0, 0.003))
            leading -= 1
            led.append(token)
            await lease.release()

        await asyncio.gather(*(claim(f"t{n}") for n in range(20)))
        assert len(led) == 20

    @with_times()
    async def test_no_wake_up_is_lost_whenever_the_lease_ends(self, service: LeaseService) -> None:
        """Ends at random moments around the waiter's check; a lost wake-up costs 1.8 s, which nothing else here does."""
        randomness = random.Random(7)

        async def trial() -> float:
            key = some_key()
            a = await won(service, key)
            waiter = asyncio.create_task(await_turn(service, key, "b", "host-b"))
            await _steps(randomness.randrange(12))
            await asyncio.sleep(randomness.choice((0, 0, 0.0003, 0.001, 0.003)) * randomness.random())
            if randomness.random() < 0.5:
                await a.release()
            else:
                await a.ready("m")
            ended = time.monotonic()
            assert isinstance(await asyncio.wait_for(waiter, BOUND), (Lease, Ready))
            return time.monotonic() - ended

        for _ in range(40):
            took = await asyncio.gather(*(trial() for _ in range(10)))
            assert max(took) < 1.5, f"a wake-up was lost: {max(took):.2f} s"

    @with_times()
    async def test_a_cancelled_waiter_leaves_nothing_behind_and_costs_the_others_nothing(
        self, service: LeaseService
    ) -> None:
        """The first of two waiters may have subscribed for both as it is cancelled."""
        randomness = random.Random(11)
        for _ in range(100):
            key = some_key()
            a = await won(service, key)
            first = asyncio.create_task(await_turn(service, key, "b", "host-b"))
            second = asyncio.create_task(await_turn(service, key, "c", "host-c"))
            await _steps(randomness.randrange(25))
            await asyncio.sleep(randomness.choice((0, 0.0005, 0.002)) * randomness.random())
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            began = time.monotonic()
            await a.release()
            lease = await asyncio.wait_for(second, BOUND)
            assert isinstance(lease, Lease)
            assert time.monotonic() - began < 1.5
            await lease.release()
            await won(service, key, "d")

    @with_times()
    async def test_cancelled_commands_do_not_mix_up_the_answers_of_others(self, service: LeaseService) -> None:
        randomness = random.Random(17)
        for n in range(20):
            await service.ready(f"{n}", f"manifest-{n}")

        async def ask(n: int) -> None:
            task = asyncio.create_task(service.acquire(f"{n}", "t", "host"))
            if randomness.random() < 0.5:
                await _steps(randomness.randrange(10))
                task.cancel()
            found = (await asyncio.gather(task, return_exceptions=True))[0]
            assert isinstance(found, asyncio.CancelledError) or found == Ready(f"manifest-{n}")

        for _ in range(15):
            await asyncio.gather(*(ask(randomness.randrange(20)) for _ in range(20)))

    @with_times()
    async def test_a_watch_times_out_when_nothing_changes_and_hears_a_change_that_came_before_it_was_asked(
        self, service: LeaseService
    ) -> None:
        key = some_key()
        a = await won(service, key)
        async with service.watch(key) as watch:
            deadline = time.monotonic() + BOUND
            while await watch.changed(0.1):  # a subscription may report itself
                assert time.monotonic() < deadline, "it reports changes that nobody made"
            await a.release()
            assert await watch.changed(BOUND)


async def _steps(count: int) -> None:
    """Steps of the event loop, not seconds."""
    for _ in range(count):
        await asyncio.sleep(0)
