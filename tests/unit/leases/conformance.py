"""The lease interface as scenarios: every implementation of `LeaseService` passes `LeaseConformance`.

A subclass gives `open_service`, an async context manager for a fresh service. Times are short and real: `TTL` is long
enough that a busy machine does not reach it within a handful of commands, and short enough to wait for.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any

from kcoord.leases.base import Answer, Failed, LeaseService, Ready, Wait, Won, await_turn, kept_alive

TTL = 0.4
LIMIT = 0.8
FAILURE_TTL = 0.4
BOUND = 8.0  # seconds; no scenario takes longer, unless something hangs
AT_ONCE = 0.2  # seconds; far below `await_turn`'s re-check, so only a wake-up is this fast

Open = Callable[..., AbstractAsyncContextManager[LeaseService]]


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


async def waiting(service: LeaseService, key: str, token: str) -> asyncio.Task[Won | Ready | Failed]:
    """A claim that is known to wait: it has subscribed, asked again, and been told to wait."""
    waits = asyncio.Event()
    task = asyncio.create_task(await_turn(service, key, token, token, on_wait=lambda wait: waits.set()))
    await asyncio.wait_for(waits.wait(), BOUND)
    return task


class LeaseConformance:
    """Scenarios. `open_service(ttl=…, limit=…, failure_ttl=…)` opens a service with these times, in seconds."""

    open_service: Open

    def run(self, scenario: Callable[[LeaseService], Coroutine[Any, Any, None]], **times: float) -> None:
        async def opened() -> None:
            async with self.open_service(**{"ttl": 30.0, "limit": 300.0, "failure_ttl": 30.0, **times}) as service:
                await scenario(service)

        bounded(opened())

    def test_a_free_key_is_won_and_a_second_claim_waits_for_its_holder(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            assert isinstance(await service.acquire(key, "a", "host-a"), Won)
            answer = await service.acquire(key, "b", "host-b")
            assert isinstance(answer, Wait)
            assert answer.holder == "host-a"
            assert 20 < answer.ttl <= 30

        self.run(scenario)

    def test_keys_do_not_touch_each_other(self) -> None:
        async def scenario(service: LeaseService) -> None:
            one, other = some_key(), some_key()
            assert isinstance(await service.acquire(one, "a", "host-a"), Won)
            assert isinstance(await service.acquire(other, "b", "host-b"), Won)
            await service.ready(one, "a", "m")
            assert isinstance(await service.acquire(other, "c", "host-c"), Wait)

        self.run(scenario)

    def test_asking_again_with_the_same_token_gives_the_same_lease(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            first = await service.acquire(key, "a", "host-a")
            assert isinstance(first, Won)
            assert await service.acquire(key, "a", "host-a") == first

        self.run(scenario)

    def test_ready_is_told_to_everybody(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            await service.ready(key, "a", "manifest-1")
            for token in ("a", "b", "c"):
                assert await service.acquire(key, token, "host") == Ready("manifest-1")

        self.run(scenario)

    def test_ready_may_be_said_twice(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            await service.ready(key, "a", "manifest-1")
            await service.ready(key, "a", "manifest-1")
            assert await service.acquire(key, "b", "host") == Ready("manifest-1")

        self.run(scenario)

    def test_an_untrue_ready_is_forgotten_by_the_claim_that_found_out(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            await service.ready(key, "a", "gone")
            assert isinstance(await service.acquire(key, "b", "host-b", void="gone"), Won)
            assert isinstance(await service.acquire(key, "c", "host-c"), Wait)

        self.run(scenario)

    def test_voiding_one_manifest_leaves_another_that_was_announced_meanwhile(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            await service.ready(key, "a", "new")
            assert await service.acquire(key, "b", "host-b", void="old") == Ready("new")

        self.run(scenario)

    def test_a_failure_is_told_with_its_log_and_then_forgotten(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            assert await service.fail(key, "a", "ptxas: no", "host-a, rank 3")
            assert await service.acquire(key, "b", "host-b") == Failed("ptxas: no", "host-a, rank 3")
            await eventually(lambda: service.acquire(key, "b", "host-b"), Won)

        self.run(scenario, failure_ttl=FAILURE_TTL)

    def test_a_failure_is_remembered_for_its_whole_time(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            await service.fail(key, "a", "log", "where")
            began = time.monotonic()
            await eventually(lambda: service.acquire(key, "b", "host-b"), Won)
            assert time.monotonic() - began > 0.7 * FAILURE_TTL

        self.run(scenario, failure_ttl=FAILURE_TTL)

    def test_a_log_of_any_characters_and_length_comes_through(self) -> None:
        async def scenario(service: LeaseService) -> None:
            for log in ("", "\0\r\n", "ünïcödé → 編譯", "x" * 100_000 + "the end"):
                key = some_key()
                await service.acquire(key, "a", "host-a")
                assert await service.fail(key, "a", log, "w")
                answer = await service.acquire(key, "b", "host-b")
                assert isinstance(answer, Failed)
                assert answer.log[-7:] == log[-7:]

        self.run(scenario)

    def test_a_released_lease_is_free(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            assert await service.release(key, "a")
            assert isinstance(await service.acquire(key, "b", "host-b"), Won)

        self.run(scenario)

    def test_a_lease_that_is_not_renewed_is_free_after_its_ttl(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            began = time.monotonic()
            await service.acquire(key, "a", "host-a")
            await eventually(lambda: service.acquire(key, "b", "host-b"), Won)
            assert time.monotonic() - began > 0.7 * TTL

        self.run(scenario, ttl=TTL, limit=300.0)

    def test_a_waiter_takes_over_when_the_holder_dies_silently(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            answer = await asyncio.wait_for(await_turn(service, key, "b", "host-b"), BOUND)
            assert isinstance(answer, Won)

        self.run(scenario, ttl=TTL, limit=300.0)

    def test_renewing_keeps_a_lease_beyond_its_ttl(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            began = time.monotonic()
            while time.monotonic() - began < 1.7 * TTL:
                assert await service.renew(key, "a")
                assert isinstance(await service.acquire(key, "b", "host-b"), Wait)
                await asyncio.sleep(TTL / 10)

        self.run(scenario, ttl=TTL, limit=300.0)

    def test_kept_alive_renews_while_its_block_runs_and_stops_after_it(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            began, losses = time.monotonic(), []
            async with kept_alive(service, key, "a", TTL, on_lost=lambda: losses.append("lost")):
                while time.monotonic() - began < 1.7 * TTL:
                    assert isinstance(await service.acquire(key, "b", "host-b"), Wait)
                    await asyncio.sleep(TTL / 10)
            assert not losses
            await eventually(lambda: service.acquire(key, "b", "host-b"), Won)

        self.run(scenario, ttl=TTL, limit=300.0)

    def test_kept_alive_tells_a_lost_lease_once(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key, losses, told = some_key(), [], asyncio.Event()

            def lost() -> None:
                losses.append("lost")
                told.set()

            await service.acquire(key, "a", "host-a")
            async with kept_alive(service, key, "a", 0.06, on_lost=lost):
                await service.ready(key, "b", "m")
                await asyncio.wait_for(told.wait(), BOUND)
                await asyncio.sleep(0.1)  # several renewals' time: none of them tells again
            assert losses == ["lost"]

        self.run(scenario)

    def test_the_hard_limit_ends_a_lease_that_is_renewed_for_ever(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            began = time.monotonic()
            await service.acquire(key, "a", "host-a")
            while await service.renew(key, "a"):
                assert time.monotonic() - began < BOUND, "the limit is not enforced"
                await asyncio.sleep(TTL / 10)
            assert time.monotonic() - began > 0.7 * LIMIT
            assert not await service.renew(key, "a")
            # it may last for the rest of a millisecond
            assert isinstance(await await_turn(service, key, "b", "host-b"), Won)
            assert not await service.renew(key, "a")

        self.run(scenario, ttl=TTL, limit=LIMIT)

    def test_the_fence_grows_with_every_lease_of_a_key(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key, fences = some_key(), []
            for n in range(30):
                won = await service.acquire(key, f"t{n}", "host")
                assert isinstance(won, Won)
                fences.append(won.fence)
                if n % 3 == 0:
                    await service.release(key, f"t{n}")
                else:
                    await service.ready(key, f"t{n}", f"m{n}")
                    won = await service.acquire(key, f"u{n}", "host", void=f"m{n}")
                    assert isinstance(won, Won)
                    fences.append(won.fence)
                    await service.release(key, f"u{n}")
            assert fences == sorted(set(fences))

        self.run(scenario)

    def test_the_fence_grows_when_a_lease_ran_out(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            first = await service.acquire(key, "a", "host-a")
            assert isinstance(first, Won)
            await asyncio.sleep(1.2 * TTL)  # what is tested is what happens when nobody does anything
            again = await service.acquire(key, "a", "host-a")
            assert isinstance(again, Won)
            assert again.fence > first.fence

        self.run(scenario, ttl=TTL, limit=300.0)

    def test_the_same_token_gets_a_new_lease_after_the_hard_limit(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            first = await service.acquire(key, "a", "host-a")
            while await service.renew(key, "a"):
                await asyncio.sleep(TTL / 10)
            again = await service.acquire(key, "a", "host-a")
            assert isinstance(first, Won)
            assert isinstance(again, Won)
            assert again.fence > first.fence
            assert isinstance(await service.acquire(key, "b", "host-b"), Wait)
            assert await service.renew(key, "a")

        self.run(scenario, ttl=TTL, limit=TTL)

    def test_a_late_token_changes_nothing(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "late", "host-a")
            await eventually(lambda: service.acquire(key, "b", "host-b"), Won)
            assert not await service.renew(key, "late")
            assert not await service.fail(key, "late", "log", "where")
            assert not await service.release(key, "late")
            answer = await service.acquire(key, "c", "host-c")
            assert isinstance(answer, Wait)
            assert answer.holder == "host-b"
            assert await service.renew(key, "b")

        self.run(scenario, ttl=TTL, limit=300.0)

    def test_ready_from_a_token_that_lost_its_lease_is_accepted(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "late", "host-a")
            await eventually(lambda: service.acquire(key, "b", "host-b"), Won)
            await service.ready(key, "late", "m")
            assert await service.acquire(key, "c", "host-c") == Ready("m")
            assert not await service.renew(key, "b")
            assert not await service.fail(key, "b", "log", "where")
            assert await service.acquire(key, "c", "host-c") == Ready("m")

        self.run(scenario, ttl=TTL, limit=300.0)

    def test_a_renewal_that_comes_after_the_release_takes_nothing(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            await service.release(key, "a")
            await service.renew(key, "a")
            assert isinstance(await service.acquire(key, "b", "host-b"), Won)

        self.run(scenario)

    def test_every_end_of_a_lease_wakes_its_waiter_at_once(self) -> None:
        ends: dict[str, tuple[Callable[[LeaseService, str], Awaitable[object]], type[Answer]]] = {
            "release": (lambda s, k: s.release(k, "a"), Won),
            "ready": (lambda s, k: s.ready(k, "a", "m"), Ready),
            "fail": (lambda s, k: s.fail(k, "a", "log", "where"), Failed),
        }

        async def scenario(service: LeaseService) -> None:
            for end, kind in ends.values():
                took = []
                for _ in range(5):
                    key = some_key()
                    await service.acquire(key, "a", "host-a")
                    waiter = await waiting(service, key, "b")
                    began = time.monotonic()
                    await end(service, key)
                    assert isinstance(await asyncio.wait_for(waiter, BOUND), kind)
                    took.append(time.monotonic() - began)
                assert min(took) < AT_ONCE, f"woken after {took} s"

        self.run(scenario)

    def test_a_hundred_waiters_of_one_key_hear_that_it_is_ready(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            waiters = [await waiting(service, key, f"w{n}") for n in range(100)]
            await service.ready(key, "a", "m")
            answers = await asyncio.wait_for(asyncio.gather(*waiters), BOUND)
            assert set(answers) == {Ready("m")}

        self.run(scenario)

    def test_of_many_simultaneous_claims_one_is_won(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            answers = await asyncio.gather(*(service.acquire(key, f"t{n}", "host") for n in range(300)))
            assert sum(isinstance(a, Won) for a in answers) == 1
            assert sum(isinstance(a, Wait) for a in answers) == 299

        self.run(scenario)

    def test_waiters_lead_one_after_the_other_and_never_two_at_once(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key, leading, led = some_key(), 0, []

            async def claim(token: str) -> None:
                nonlocal leading
                assert isinstance(await await_turn(service, key, token, token), Won)
                leading += 1
                assert leading == 1, "two leaders at once"
                await asyncio.sleep(random.uniform(0, 0.003))
                leading -= 1
                led.append(token)
                await service.release(key, token)

            await asyncio.gather(*(claim(f"t{n}") for n in range(20)))
            assert len(led) == 20

        self.run(scenario)

    def test_no_wake_up_is_lost_whenever_the_lease_ends(self) -> None:
        """Ends at random moments around the waiter's check; a lost wake-up costs 1.8 s, which nothing else here does."""

        async def scenario(service: LeaseService) -> None:
            randomness = random.Random(7)

            async def trial() -> float:
                key = some_key()
                await service.acquire(key, "a", "host-a")
                waiter = asyncio.create_task(await_turn(service, key, "b", "host-b"))
                for _ in range(randomness.randrange(12)):  # steps of the event loop, not seconds
                    await asyncio.sleep(0)
                await asyncio.sleep(randomness.choice((0, 0, 0.0003, 0.001, 0.003)) * randomness.random())
                if randomness.random() < 0.5:
                    await service.release(key, "a")
                else:
                    await service.ready(key, "a", "m")
                ended = time.monotonic()
                assert isinstance(await asyncio.wait_for(waiter, BOUND), (Won, Ready))
                return time.monotonic() - ended

            for _ in range(40):
                took = await asyncio.gather(*(trial() for _ in range(10)))
                assert max(took) < 1.5, f"a wake-up was lost: {max(took):.2f} s"

        self.run(scenario)

    def test_cancelled_claims_leave_nothing_behind(self) -> None:
        async def scenario(service: LeaseService) -> None:
            randomness = random.Random(11)
            key = some_key()
            await service.acquire(key, "a", "host-a")
            for n in range(150):
                waiter = asyncio.create_task(await_turn(service, key, f"w{n}", "host-w"))
                for _ in range(randomness.randrange(8)):
                    await asyncio.sleep(0)
                await asyncio.sleep(randomness.choice((0, 0.0005, 0.002)) * randomness.random())
                waiter.cancel()
                await asyncio.gather(waiter, return_exceptions=True)
            waiter = await waiting(service, key, "b")
            began = time.monotonic()
            await service.release(key, "a")
            assert isinstance(await asyncio.wait_for(waiter, BOUND), Won)
            assert time.monotonic() - began < 1.5
            await service.release(key, "b")

        self.run(scenario)

    def test_a_cancelled_claim_costs_the_others_nothing(self) -> None:
        """The first of two claims subscribes for both; it is cancelled half-way."""

        async def scenario(service: LeaseService) -> None:
            randomness = random.Random(13)
            for _ in range(60):
                key = some_key()
                await service.acquire(key, "a", "host-a")
                first = asyncio.create_task(await_turn(service, key, "b", "host-b"))
                second = asyncio.create_task(await_turn(service, key, "c", "host-c"))
                for _ in range(randomness.randrange(25)):
                    await asyncio.sleep(0)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                began = time.monotonic()
                await service.ready(key, "a", "m")
                assert await asyncio.wait_for(second, BOUND) == Ready("m")
                assert time.monotonic() - began < 1.5

        self.run(scenario)

    def test_cancelled_commands_do_not_mix_up_the_answers_of_others(self) -> None:
        async def scenario(service: LeaseService) -> None:
            randomness = random.Random(17)
            for n in range(20):
                await service.ready(f"{n}", "a", f"manifest-{n}")

            async def ask(n: int) -> None:
                task = asyncio.create_task(service.acquire(f"{n}", "t", "host"))
                if randomness.random() < 0.5:
                    for _ in range(randomness.randrange(10)):
                        await asyncio.sleep(0)
                    task.cancel()
                found = (await asyncio.gather(task, return_exceptions=True))[0]
                assert isinstance(found, asyncio.CancelledError) or found == Ready(f"manifest-{n}")

            for _ in range(15):
                await asyncio.gather(*(ask(randomness.randrange(20)) for _ in range(20)))

        self.run(scenario)

    def test_a_watch_times_out_when_nothing_changes(self) -> None:
        async def scenario(service: LeaseService) -> None:
            async with service.watch(some_key()) as watch:
                await watch.changed(0.1)  # a subscription may report itself
                assert not await watch.changed(0.05)

        self.run(scenario)

    def test_a_watch_hears_a_change_that_came_before_it_was_asked(self) -> None:
        async def scenario(service: LeaseService) -> None:
            key = some_key()
            await service.acquire(key, "a", "host-a")
            async with service.watch(key) as watch:
                while await watch.changed(0.1):
                    pass
                await service.release(key, "a")
                assert await watch.changed(BOUND)

        self.run(scenario)

    def test_a_healthy_service_answers_a_ping(self) -> None:
        async def scenario(service: LeaseService) -> None:
            await service.ping()

        self.run(scenario)
