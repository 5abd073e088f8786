"""Threads at a file system that hangs: turns, and threads that are left behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from kcoord.errors import SettingsError, StoreError
from kcoord.files.bounded_threads import BoundedThreads, Paused, Silent
from kcoord.files.daemon import in_daemon


@pytest.fixture
def answers() -> Iterator[threading.Event]:
    """The file system hangs until this is set."""
    event = threading.Event()
    yield event
    event.set()


def io(patience: float = 60.0) -> BoundedThreads:
    return BoundedThreads(Path("/store"), abreast=1, patience=patience)


async def until_back(threads: BoundedThreads) -> None:
    while threads.stuck:
        await asyncio.sleep(0.005)


async def test_uses_have_their_turn_in_order_and_a_cancelled_caller_s_has_none(answers: threading.Event) -> None:
    threads, order = io(), []
    first = asyncio.create_task(threads.run(lambda: answers.wait(60)))
    others = [asyncio.create_task(threads.run(lambda n=n: order.append(n))) for n in range(4)]  # type: ignore[misc]
    await asyncio.sleep(0)
    others[2].cancel()
    await asyncio.sleep(0.05)
    assert not first.done()
    answers.set()
    await asyncio.wait({first, *others})
    assert order == [0, 1, 3]
    assert await threads.run(lambda: "next") == "next"
    threads.close()


async def test_a_stuck_use_is_given_up_and_the_others_get_no_thread_until_the_owner_resumes(
    answers: threading.Event,
) -> None:
    threads, ran = io(patience=0.1), []
    works = lambda: answers.wait(60), *[lambda: ran.append(1)] * 3
    first, *behind = (asyncio.create_task(threads.run(work)) for work in works)
    with pytest.raises(Silent, match=r"has not answered for 0\.1 s: look at its server"):
        await first
    await asyncio.wait(behind)
    assert [type(each.exception()) for each in behind] == [Paused] * 3
    assert (threads.stuck, threads.paused, ran) == (1, True, [])
    threads.paused = False
    assert await threads.run(lambda: "done") == "done", "another thread has taken the stuck one's place"
    answers.set()
    await until_back(threads)
    threads.close()


async def test_a_cancelled_caller_s_thread_keeps_its_place_until_it_is_back(answers: threading.Event) -> None:
    threads = io()
    first = asyncio.create_task(threads.run(lambda: answers.wait(60)))
    await asyncio.sleep(0.05)
    first.cancel()
    second = asyncio.create_task(threads.run(lambda: "next"))
    await asyncio.sleep(0.05)
    assert first.cancelled()
    assert not second.done()
    answers.set()
    assert await second == "next"
    threads.close()


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
