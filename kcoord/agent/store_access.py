"""The store as one agent uses it: nothing waits long for it, a fault is told once, and its end too.

While it does not answer, or could not be opened yet, nobody is sent to it. After another fault (it is full, read-only, gone)
every artifact is tried, which fails at once; in either case a probe finds out in the background when it takes artifacts again.
What was not published meanwhile stays on this node.

Many are at the store at once, and what one of them says may be old: a publish that began before a fault, and succeeds during it,
does not end it, and one that began during a fault, and fails after its end, begins none. So everything that is done there
remembers in which *phase*, well or faulty, it began.

A few are at the store at a time, and the others wait for their turn. That time is not the store's: only what has been there for
`PATIENCE` seconds says that it does not answer. Its thread is given up then, and another one takes its place.
"""

from __future__ import annotations

import asyncio
import functools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Generic, TypeVar

from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.files.faults import (
    fault_of,
)
from kcoord.leases.base import within
from kcoord.telemetry.events import Notices, log

T = TypeVar("T")

PATIENCE = 60.0  # seconds for one artifact; an NFS server's restart takes 20
_TURN_WITHIN = 60.0  # seconds before that, for its turn
_ABREAST = 8  # uses at a time
_MOST_STUCK = 200  # threads that the store has not given back; with more of them it is not used again
_GRACE = 3.0  # seconds that those who wait for their turn are given after the store was found not to answer
_FIRST_PROBE, _SLOWEST_PROBE = 1.0, 15.0  # seconds
_MOST_TOLD = 5  # faults; a store that comes and goes does not fill the log
_AT_ONCE = 2.0  # seconds that a look at the store's state may take


class _Visit(Generic[T]):
    """One use of the store. `outcome` is what its caller hears, which may be before its thread is back, or there is one."""

    def __init__(self, work: Callable[[Store], T], publishes: bool) -> None:
        self.work, self.publishes = work, publishes
        self.began = 0  # in which phase
        self.timer: asyncio.TimerHandle | None = None
        self.outcome: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()
        self.outcome.add_done_callback(lambda told: told.cancelled() or told.exception())  # seen, though nobody waits

    def wait(self, seconds: float, then: Callable[[], None]) -> None:
        """Call `then` after so long, and nothing else that was to be called."""
        self.wait_no_more()
        self.timer = asyncio.get_running_loop().call_later(seconds, then)

    def wait_no_more(self) -> None:
        if self.timer is not None:
            self.timer.cancel()

    def tell(self, result: T | None) -> None:
        if not self.outcome.done():
            self.outcome.set_result(result)


class SharedStore:
    """`store` is None if there is none. One whose `open` has not returned yet is opened in the background."""

    def __init__(self, store: Store | None, notices: Notices) -> None:
        self._store, self._notices = store, notices
        self._io = ThreadPoolExecutor(_ABREAST, "store")
        self._queue: dict[_Visit[Any], None] = {}  # in order; those who have no thread yet
        self._there: set[_Visit[Any]] = set()  # who have one
        self._stuck: set[_Visit[Any]] = set()  # whose thread was given up
        self._overdue: set[_Visit[Any]] = set()  # of the queue and of those there, whose callers went on without them
        self._closed = store is not None and not store.opened
        self._phase = int(self._closed)  # one more whenever it fails, or is well again: odd while it is faulty
        self._told: set[str] = set()  # what was told of the present fault
        self._told_before: set[str] = set()  # and of those before it
        self._probing: asyncio.Task[None] | None = None
        self._look: asyncio.Future[None] | None = None

    @property
    def faulty(self) -> bool:
        """Whether what this node compiles does not get into the store now, as far as it knows."""
        return self._phase % 2 == 1

    @property
    def _faults(self) -> int:
        return (self._phase + 1) // 2

    async def use(
        self, work: Callable[[Store], T], patience: float | None = None, *, publishes: bool = False
    ) -> T | None:
        """What ``work(store)`` returns; None if there is no store, or it does not answer, now or lately, or fails.

        It takes `PATIENCE` seconds at most, after a minute in which others are at the store. With `patience` its caller goes on
        without it after so many seconds, which does not make the store faulty; until it comes after all, nobody else with
        `patience` waits. With `publishes`, whatever else than None `work` returns says that it has published, and its turn is
        waited for until the store does not answer. Raises what else than `StoreError` `work` raises. Not guaranteed: that `work`
        ends when this does; its thread goes on.
        """
        store = self._store
        if store is None or (patience is not None and self._overdue):
            return None
        if self._closed:
            self._probe(store)
            return None
        visit = _Visit(work, publishes)
        self._queue[visit] = None
        if not publishes:
            visit.wait(_TURN_WITHIN, functools.partial(self._had_no_turn, store, visit))
        self._send(store)
        try:
            await asyncio.wait({visit.outcome}, timeout=patience)
        except asyncio.CancelledError:
            self._turn_away(visit)
            raise
        if patience is not None and not visit.outcome.done():
            self._overdue.add(visit)
            self._notices.tell(f"{_silent(store, patience)}; this node goes on without it meanwhile")
            return None
        return visit.outcome.result()

    async def takes_artifacts(self) -> bool:
        """Look, unless it is known. A store that does not answer within seconds gets the benefit of the doubt."""
        store = self._store
        if store is None:
            return True
        if not self.faulty:
            if self._look is None or self._look.done():  # else its thread may hang, as would ours
                self._look = _in_daemon(store.check)
            began = self._phase
            try:
                await within(_AT_ONCE, asyncio.shield(self._look))
            except asyncio.TimeoutError:
                pass
            except StoreError as error:
                self._failed(store, error, began)
        return not self.faulty

    def _send(self, store: Store) -> None:
        """To the store, as many of those who wait as there is room for."""
        while self._queue and len(self._there) < _ABREAST and not self._closed:
            visit = next(iter(self._queue))
            del self._queue[visit]
            self._there.add(visit)
            visit.began = self._phase
            visit.wait(PATIENCE, functools.partial(self._is_stuck, store, visit))
            thread = asyncio.get_running_loop().run_in_executor(self._io, visit.work, store)
            thread.add_done_callback(functools.partial(self._is_back, store, visit))

    def _is_back(self, store: Store, visit: _Visit[Any], thread: asyncio.Future[Any]) -> None:
        self._stuck.discard(visit)
        self._overdue.discard(visit)
        error = None if thread.cancelled() else thread.exception()
        if visit not in self._there:
            return  # its thread was given up, and what it says is old
        self._there.discard(visit)
        visit.wait_no_more()
        if isinstance(error, StoreError):
            self._failed(store, error, visit.began)
        elif error is not None:
            visit.outcome.set_exception(error)
        elif not thread.cancelled():
            done = thread.result()
            if visit.publishes and done is not None and not self._closed:
                self._worked(store, visit.began)
            visit.tell(done)
        visit.tell(None)
        self._send(store)

    def _is_stuck(self, store: Store, visit: _Visit[Any]) -> None:
        """It has been there for `PATIENCE` seconds."""
        self._there.discard(visit)
        self._overdue.discard(visit)
        self._stuck.add(visit)
        held, self._io = self._io, ThreadPoolExecutor(_ABREAST, "store")
        held.shutdown(wait=False)  # its other threads finish what they do
        visit.tell(None)
        if self._failed(store, _silent(store, PATIENCE), visit.began) and not self._closed:
            self._closed = True
            asyncio.get_running_loop().call_later(_GRACE, self._turn_all_away)
        self._send(store)

    def _had_no_turn(self, store: Store, visit: _Visit[Any]) -> None:
        self._notices.tell(
            f"the store {store.root} is slow: what has waited for {_TURN_WITHIN:g} s for its turn is not fetched",
            about=f"slow {store.root}",
        )
        self._turn_away(visit)

    def _turn_away(self, visit: _Visit[Any]) -> None:
        """If it has no thread yet it gets none."""
        if visit in self._queue:
            del self._queue[visit]
            self._overdue.discard(visit)
            visit.wait_no_more()
            visit.tell(None)

    def _turn_all_away(self) -> None:
        """Unless the store answers again: only some of it hung."""
        if self._closed:
            for visit in list(self._queue):
                self._turn_away(visit)

    def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        self._store = None
        for visit in list(self._queue):
            self._turn_away(visit)
        self._io.shutdown(wait=False, cancel_futures=True)

    def _failed(self, store: Store, error: StoreError, began: int) -> bool:
        """What began in the phase `began` met `error`. Whether that is the present fault, or a new one.

        If not, it is a straggler of a fault that is over, and the store is looked at once more: it may have met the next one.
        """
        if not self.faulty and began == self._phase:
            self._phase += 1
            self._told_before |= self._told
            self._told = set()
        ours = self.faulty and began >= self._phase - 1
        if ours:
            self._tell_fault(store, error)
        self._probe(store)
        return ours

    def _tell_fault(self, store: Store, error: StoreError) -> None:
        """Once a fault. What else the agent writes to the store names its faults by `fault_of`, and is not to tell them again."""
        if self._faults > _MOST_TOLD or error.remedy in self._told:
            return
        self._told.add(error.remedy)
        about = fault_of(store.root, error)
        again = f" (fault {self._faults})" if error.remedy in self._told_before else ""
        self._notices.tell(fault_line(store, error), about=f"{about}{again}")

    def _worked(self, store: Store, began: int) -> None:
        """What began in the phase `began` did all that publishing does. The end of a fault, if it began during that fault."""
        if not self.faulty or began != self._phase:
            return
        if self._faults <= _MOST_TOLD:
            self._notices.tell(
                f"the store {store.root} is back: artifacts are published there again",
                about=f"back in {store.root} {self._faults}",
            )
        self._closed, self._look = False, None
        self._phase += 1
        self._send(store)

    def _probe(self, store: Store) -> None:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._until_well(store))
            self._probing.add_done_callback(self._probed)

    def _probed(self, probe: asyncio.Task[None]) -> None:
        """The next who meets the fault begins another probe."""
        if not probe.cancelled() and (error := probe.exception()) is not None:
            self._notices.tell(f"an error in the agent, please report it: {type(error).__name__}: {error}")
            log.error("the store was not looked at", exc_info=error)

    async def _until_well(self, store: Store) -> None:
        pause = _FIRST_PROBE
        while True:
            await asyncio.sleep(pause * random.uniform(0.9, 1.1))
            pause = min(2 * pause, _SLOWEST_PROBE)
            began = self._phase
            try:
                await _in_daemon(store.check if store.opened else lambda: _opened(store))  # as long as it takes
            except StoreError as error:
                self._failed(store, error, began)
            else:
                if len(self._stuck) < _MOST_STUCK:
                    self._worked(store, began)
            if not self.faulty:
                return


def fault_line(store: Store, error: StoreError) -> str:
    """What a user is told of a store that cannot be used."""
    return f"the store cannot be used: {store.root}: {error.remedy}; training goes on, and artifacts stay on this node"


def _opened(store: Store) -> None:
    store.open()
    store.check()


def _in_daemon(work: Callable[[], object]) -> asyncio.Future[None]:
    """`work` in a thread of its own, which a dead NFS server may hold for ever: nobody joins it. Raises `StoreError`."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def attempt() -> None:
        failure: StoreError | None = StoreError("an error in the agent; its log has it")
        try:
            work()
            failure = None
        except StoreError as error:
            failure = error
        finally:
            with suppress(RuntimeError):  # the agent has ended
                loop.call_soon_threadsafe(_settle, done, failure)

    threading.Thread(target=attempt, daemon=True).start()
    return done


def _settle(done: asyncio.Future[None], error: StoreError | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(None)
    else:
        done.set_exception(error)


async def opened(store: Store, patience: float, notices: Notices) -> None:
    """Open `store` within `patience` seconds; if that fails it is told, and a `SharedStore` goes on trying."""
    try:
        await within(patience, _in_daemon(store.open))
    except StoreError as error:
        fault = error
    except asyncio.TimeoutError:
        fault = _silent(store, patience)
    else:
        return
    notices.tell(fault_line(store, fault), about=fault_of(store.root, fault))


def _silent(store: Store, patience: float) -> StoreError:
    why = f"it has not answered for {round(patience, 1):g} s: look at its server and its mount"
    return StoreError(f"{store.root}: {why}", why)
