"""Patience with a file system that hangs: turns, threads that are left behind, and news that may be old."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from kcoord.errors import SettingsError, StoreError
from kcoord.files.daemon import in_daemon
from kcoord.files.health import Health, State
from kcoord.files.patience import NoTurn, PatientIO, Silent


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """The file system hangs until this is set."""
    event = threading.Event()
    yield event
    event.set()


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    async def played() -> None:
        await asyncio.wait_for(scenario(), 40)

    asyncio.run(played())


def io(abreast: int = 1, patience: float = 60.0, *, gives_up: bool = True) -> PatientIO:
    return PatientIO(Path("/store"), "test", abreast=abreast, patience=patience, gives_up=gives_up)


def test_uses_have_their_turn_in_order_and_one_may_withdraw(answers: threading.Event) -> None:
    async def scenario() -> None:
        threads, order = io(), []
        first = threads.submit(lambda: answers.wait(60))
        others = [threads.submit(lambda n=n: order.append(n)) for n in range(4)]  # type: ignore[misc]
        late = threads.submit(lambda: order.append(9), 0.05)
        threads.withdraw(others[2])
        with pytest.raises(NoTurn) as caught:
            await late
        assert caught.value.late
        assert (threads.busy, first.done()) == (1, False)
        answers.set()
        await asyncio.wait({first, *others})
        assert order == [0, 1, 3]
        assert isinstance(others[2].exception(), NoTurn)
        threads.close()

    play(scenario)


def test_a_stuck_use_is_given_up_and_the_others_wait_until_somebody_resumes(answers: threading.Event) -> None:
    async def scenario() -> None:
        threads = io(patience=0.1)
        with pytest.raises(Silent, match=r"has not answered for 0\.1 s: look at its server"):
            await threads.submit(lambda: answers.wait(60))
        assert (threads.busy, threads.stuck, threads.paused) == (0, 1, True)
        second = threads.submit(lambda: "done")
        await asyncio.sleep(0.2)
        assert not second.done(), "its time has not begun"
        threads.resume()
        assert await second == "done", "another thread has taken the stuck one's place"
        answers.set()
        while threads.stuck:
            await asyncio.sleep(0.005)
        threads.close()

    play(scenario)


def test_without_giving_up_a_stuck_use_keeps_its_place_and_its_result(answers: threading.Event) -> None:
    async def scenario() -> None:
        threads = io(patience=0.05, gives_up=False)
        first, second = threads.submit(lambda: answers.wait(60)), threads.submit(lambda: "done")
        while not threads.stuck:
            await asyncio.sleep(0.005)
        assert (threads.busy, threads.paused, second.done()) == (1, False, False)
        answers.set()
        assert (await first, await second) == (True, "done")
        assert threads.stuck == 0
        threads.close()

    play(scenario)


def test_a_cancelled_caller_withdraws_its_use_and_takes_no_thread_along(answers: threading.Event) -> None:
    async def scenario() -> None:
        threads, ran = io(), []
        first = threads.submit(lambda: answers.wait(60))
        caller = asyncio.create_task(threads.run(lambda: ran.append(1)))
        await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        answers.set()
        assert await first
        assert await threads.run(lambda: "next") == "next"
        assert ran == []
        threads.close()

    play(scenario)


def test_a_daemons_errors_are_its_callers_and_an_unexpected_one_is_an_error_of_kcoord(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    printed = []
    monkeypatch.setattr(threading, "excepthook", printed.append)

    def raises(error: Exception) -> object:
        raise error

    for error in (SettingsError("it"), OSError("it")):
        assert in_daemon(lambda error=error: raises(error)).exception(20) is error  # type: ignore[misc]
    unexpected = in_daemon(lambda: raises(ZeroDivisionError()))
    assert isinstance(unexpected.exception(20), StoreError)
    assert in_daemon(lambda: 7).result(20) == 7
    wait([unexpected])


def test_old_news_neither_begin_nor_end_a_fault() -> None:
    health = Health()
    before = health.period
    assert health.failed(before)
    assert (health.state, health.faults) == (State.FAULTY, 1)
    during = health.period
    assert health.failed(before), "the same fault"
    assert health.failed(during)
    assert not health.worked(before)
    assert health.worked(during)
    assert not health.failed(during), "that fault is over"
    assert not health.failed(before)
    assert (health.state, health.faults) == (State.WELL, 1)
    assert health.failed(health.period, silent=True)
    assert (health.state, health.faults) == (State.SILENT, 2)
    assert health.failed(health.period)
    assert health.state is State.SILENT, "an error is no answer"


def test_one_that_was_never_opened_is_silent_until_a_probe_works() -> None:
    health = Health(State.SILENT)
    assert (health.faults, health.failed(health.period), health.state) == (1, True, State.SILENT)
    assert health.worked(health.period)
    assert health.state is State.WELL
