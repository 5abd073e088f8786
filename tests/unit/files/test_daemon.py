"""Work that is deferred: once for all who ask, and withdrawn as the process closes."""

from __future__ import annotations

import threading
import time

import pytest

from kcoord.files.daemon import Deferred
from tests.support.sandbox import eventually

_NEVER, _BOUND = 3600.0, 20.0


def test_it_is_called_once_for_all_who_ask_meanwhile_and_again_for_those_who_ask_later() -> None:
    calls: list[None] = []
    called = threading.Semaphore(0)

    def work() -> None:
        calls.append(None)
        called.release()

    deferred = Deferred(0.05, work)
    for number in (1, 2):
        for _ in range(3):
            deferred.begin()
        assert called.acquire(timeout=_BOUND)
        eventually(lambda: deferred._timer is None)
        assert len(calls) == number


def test_after_its_end_it_begins_anew() -> None:
    deferred = Deferred(_NEVER, lambda: None)
    for _ in range(2):
        deferred.begin()
        assert deferred._timer is not None
        timer = deferred._timer
        assert timer.is_alive()
        deferred.end(_BOUND)
        assert not timer.is_alive()


def test_its_end_waits_for_a_call_that_has_begun_and_for_so_long_only() -> None:
    begun, hangs = threading.Event(), threading.Event()
    deferred = Deferred(0.0, lambda: begun.set() or hangs.wait(_BOUND))
    deferred.begin()
    assert begun.wait(_BOUND)
    started = time.monotonic()
    deferred.end(0.1)
    assert 0.1 <= time.monotonic() - started < _BOUND
    hangs.set()


def test_without_a_thread_the_next_who_asks_tries_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    deferred = Deferred(_NEVER, lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Timer, "start", start)
        deferred.begin()
    deferred.begin()
    assert deferred._timer is not None
    assert deferred._timer.is_alive()
    deferred.end(_BOUND)
