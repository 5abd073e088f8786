"""Threads for a file system that may hang: every wait is bounded, and a thread that hangs is left behind."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from kcoord.errors import StoreError

T = TypeVar("T")


class NoTurn(StoreError):
    """A use of the file system had no thread in time, and none was begun. `late`: since the other uses took so long."""

    late = False


class Silent(StoreError):
    """The file system has not answered a use in time. Its thread was left behind."""


def silent(root: Path, seconds: float) -> Silent:
    remedy = f"it has not answered for {round(seconds, 1):g} s: look at its server and its mount"
    return Silent(f"{root}: {remedy}", remedy, passing=True)


def in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Run `work` in a thread of its own, which a dead NFS server may hold for ever: an agent ends without joining it."""
    return asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), work)


class PatientIO:
    """Threads for the file system at `root`: `abreast` uses at a time, and the others wait for their turn, in order.

    A use that has had its thread for `patience` seconds is *stuck*. The wait for a turn does not count: that time is not the file
    system's. With `gives_up`, a stuck use ends with `Silent`, its thread is left behind, and `paused` is set: no other use is
    begun until `resume`. Without it, the use goes on, and keeps its place.
    """

    def __init__(self, root: Path, name: str, *, abreast: int, patience: float, gives_up: bool) -> None:
        self.root, self._name, self._abreast, self._patience, self._gives_up = root, name, abreast, patience, gives_up
        self.paused = False
        self._pool = ThreadPoolExecutor(abreast, name)
        self._waiting: dict[asyncio.Future[Any], Callable[[], Any]] = {}  # a use, by its outcome, in order
        self._there: set[asyncio.Future[Any]] = set()  # uses that have a thread
        self._stuck: set[asyncio.Future[Any]] = set()  # uses whose thread is overdue
        self._timers: dict[asyncio.Future[Any], asyncio.TimerHandle] = {}

    @property
    def busy(self) -> int:
        """Uses that have a thread now, and were not given up."""
        return len(self._there)

    @property
    def stuck(self) -> int:
        """Threads that are overdue now."""
        return len(self._stuck)

    def submit(self, work: Callable[[], T], turn_within: float | None = None) -> asyncio.Future[T]:
        """Begin `work` when its turn comes. The future has its result, or raises its exception, `Silent`, or `NoTurn`: after
        `turn_within` seconds without a thread, and if the use is withdrawn.

        Do not cancel the future; a cancelled caller withdraws it. Not guaranteed: that `work` ends when the future does.
        """
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, though nobody waits
        self._waiting[outcome] = work
        if turn_within is not None:
            self._set_timer(turn_within, outcome, functools.partial(self.withdraw, late=True))
        self._begin_next()
        return outcome

    async def run(self, work: Callable[[], T]) -> T:
        """The outcome of `submit`. If this is cancelled, a thread that has begun goes on."""
        outcome = self.submit(work)
        try:
            return await asyncio.shield(outcome)
        except asyncio.CancelledError:
            self.withdraw(outcome)
            raise

    def withdraw(self, outcome: asyncio.Future[Any], *, late: bool = False) -> None:
        """End a use with `NoTurn` if it has no thread yet."""
        if self._waiting.pop(outcome, None) is not None:
            self._end_timer(outcome)
            error = NoTurn(f"{self.root}: no thread was free")
            error.late = late
            outcome.set_exception(error)

    def withdraw_all(self) -> None:
        for outcome in list(self._waiting):
            self.withdraw(outcome)

    def resume(self) -> None:
        self.paused = False
        self._begin_next()

    def close(self) -> None:
        """Begin no other use; nobody waits for those that have begun."""
        self.paused = True
        self.withdraw_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin_next(self) -> None:
        while self._waiting and len(self._there) < self._abreast and not self.paused:
            outcome = next(iter(self._waiting))
            work = self._waiting.pop(outcome)
            self._there.add(outcome)
            self._set_timer(self._patience, outcome, self._is_stuck)
            thread = asyncio.get_running_loop().run_in_executor(self._pool, work)
            thread.add_done_callback(functools.partial(self._is_back, outcome))

    def _is_stuck(self, outcome: asyncio.Future[Any]) -> None:
        self._stuck.add(outcome)
        if self._gives_up:
            self._there.discard(outcome)
            left_behind, self._pool = self._pool, ThreadPoolExecutor(self._abreast, self._name)
            left_behind.shutdown(wait=False)  # its other threads finish their work
            self.paused = True
            outcome.set_exception(silent(self.root, self._patience))

    def _is_back(self, outcome: asyncio.Future[Any], thread: asyncio.Future[Any]) -> None:
        error = StoreError(f"{self.root}: it is not used any more") if thread.cancelled() else thread.exception()
        self._stuck.discard(outcome)
        self._there.discard(outcome)
        self._end_timer(outcome)
        if not outcome.done():  # else it was given up, and its result is old
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(thread.result())
        self._begin_next()

    def _set_timer(
        self, seconds: float, outcome: asyncio.Future[Any], then: Callable[[asyncio.Future[Any]], None]
    ) -> None:
        """Call ``then(outcome)`` after so long, and nothing else that was to be called."""
        self._end_timer(outcome)
        self._timers[outcome] = asyncio.get_running_loop().call_later(seconds, then, outcome)

    def _end_timer(self, outcome: asyncio.Future[Any]) -> None:
        timer = self._timers.pop(outcome, None)
        if timer is not None:
            timer.cancel()
