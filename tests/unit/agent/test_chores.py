"""Chores: one run at a time, none before it is due, and an end within its bound, whatever the disk does."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest

from kcoord.agent.chores.chore import Chore, Chores, DiskThread
from kcoord.telemetry.events import Notices


@pytest.fixture
def disk() -> Iterator[threading.Event]:
    """It hangs until this is set."""
    answers = threading.Event()
    yield answers
    answers.set()


def chore(work: Callable[[], Awaitable[float | None]], notices: Notices | None = None, **named: Any) -> Chore:
    return Chore("chore", DiskThread("chore"), work, notices or Notices(), **named)


async def test_a_run_that_hangs_is_followed_by_no_other_and_holds_up_nobody_at_the_end(disk: threading.Event) -> None:
    runs = 0

    def work() -> None:
        nonlocal runs
        runs += 1
        disk.wait(60)

    hung = chore(lambda: hung.thread.run(work))
    chores, begun = Chores([hung]), time.monotonic()
    for _ in range(5):
        chores.pulse()
        await asyncio.sleep(0.01)
    await chores.drain(0.2)
    assert runs == 1
    assert time.monotonic() - begun < 20


async def test_a_run_is_not_made_before_it_is_due_or_if_none_is_wanted() -> None:
    runs = []

    async def work() -> float | None:
        runs.append(len(runs))
        return 0.0 if len(runs) == 1 else None

    made = chore(work, first=100.0, every=100.0, wanted=lambda: wanted)
    wanted, now = True, time.monotonic()
    made.pulse(now + 79.0)
    assert not made.under_way
    wanted = False
    made.pulse(now + 121.0)
    assert not made.under_way
    wanted = True
    made.pulse(now + 121.0)
    await made.settled()
    made.pulse(time.monotonic())  # the first run has asked for no pause
    await made.settled()
    made.pulse(time.monotonic())
    assert runs == [0, 1]
    made.begin()
    await made.settled()
    assert runs == [0, 1, 2]


async def test_after_a_slow_run_it_rests_for_a_multiple_of_the_time() -> None:
    made = chore(lambda: asyncio.sleep(0.2, None), rest=1000)
    made.pulse(time.monotonic())
    await made.settled()
    made.pulse(time.monotonic() + 190.0)
    assert not made.under_way
    made.pulse(time.monotonic() + 1000.0)
    assert made.under_way


async def test_a_hastened_run_is_made_before_it_is_due_but_not_unless_it_is_wanted_or_while_the_disk_is_left_alone() -> (
    None
):
    runs: list[str] = []
    unsaved: list[str] = []

    async def work() -> None:
        runs.append(unsaved.pop())
        await asyncio.sleep(0.05)

    made = chore(work, first=100.0, rest=1000, wanted=lambda: bool(unsaved))
    made.run_soon()
    assert not made.under_way
    unsaved += ["two", "one"]
    made.run_soon()
    await made.settled()
    made.run_soon()
    assert not made.under_way
    assert runs == ["one"]


async def test_an_error_is_told_once_logged_each_time_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    notices = Notices()

    async def work() -> None:
        raise ZeroDivisionError("here")

    made = chore(work, notices)
    for _ in range(2):
        made.pulse(time.monotonic())
        await made.settled()
        await asyncio.sleep(0)
    assert notices.since(0)[0] == ["an error in the agent, please report it: ZeroDivisionError: here"]
    logged = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert [record.exc_info is not None for record in logged] == [True, True]


async def test_at_the_end_the_last_run_follows_the_one_that_is_under_way() -> None:
    made: list[str] = []

    async def work() -> None:
        await asyncio.sleep(0.05)
        made.append("run")

    async def last() -> None:
        made.append("last")

    one = chore(work, last=last)
    one.pulse(time.monotonic())
    await asyncio.sleep(0)
    await Chores([one]).drain(20)
    one.begin()
    assert (made, one.under_way, one.ended.is_set()) == (["run", "last"], False, True)


async def test_at_the_end_a_run_without_a_last_one_is_cancelled_and_a_last_one_that_hangs_is_given_up(
    disk: threading.Event,
) -> None:
    released = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            released.set()

    one = chore(work)
    one.pulse(time.monotonic())
    await asyncio.sleep(0)
    other = chore(work, last=lambda: other.thread.run(lambda: disk.wait(60)))
    await Chores([one], [other]).drain(0.2)
    assert released.is_set()
