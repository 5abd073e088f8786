"""The store as one agent uses it: nothing waits long for it, a fault is told once, and its end too.

While it does not answer, or could not be opened yet, nobody is sent to it. After another fault (it is full, read-only, gone)
every artifact is tried, which fails at once; in either case a probe finds out in the background when it takes artifacts again.
What was not published meanwhile stays on this node.

Many are at the store at once, and what one of them says may be old: a publish that began before a fault, and succeeds during it,
does not end it, and one that began during a fault, and fails after its end, begins none. So everything that is done there
remembers in which *phase*, well or faulty, it began.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from kcoord.artifacts.publish import fault_of
from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.leases.base import within
from kcoord.telemetry.events import Notices, log

T = TypeVar("T")

PATIENCE = 60.0  # seconds for one artifact; an NFS server's restart takes 20
_FIRST_PROBE, _SLOWEST_PROBE = 1.0, 15.0  # seconds
_MOST_TOLD = 5  # faults; a store that comes and goes does not fill the log
_AT_ONCE = 2.0  # seconds that a look at the store's state may take


class SharedStore:
    """`store` is None if there is none. One whose `open` has not returned yet is opened in the background."""

    def __init__(self, store: Store | None, notices: Notices) -> None:
        self._store, self._notices = store, notices
        self._io = ThreadPoolExecutor(8, "store")
        self._closed = store is not None and not store.opened
        self._phase = int(self._closed)  # one more whenever it fails, or is well again: odd while it is faulty
        self._told: set[str] = set()  # what was told of the present fault
        self._told_before: set[str] = set()  # and of those before it
        self._probing: asyncio.Task[None] | None = None

    @property
    def faulty(self) -> bool:
        """Whether what this node compiles does not get into the store now, as far as it knows."""
        return self._phase % 2 == 1

    @property
    def _faults(self) -> int:
        return (self._phase + 1) // 2

    async def use(self, work: Callable[[Store], T], patience: float = PATIENCE, *, publishes: bool = False) -> T | None:
        """What ``work(store)`` returns; None if there is no store, or it does not answer, now or lately, or fails.

        With `publishes`, whatever else `work` returns says that it has published. Raises what
        else than `StoreError` `work` raises. Not guaranteed: that `work` ends when this does; its thread goes on.
        """
        store = self._store
        if store is None:
            return None
        if self._closed:
            self._probe(store)
            return None
        began = self._phase
        try:
            done = await within(patience, asyncio.get_running_loop().run_in_executor(self._io, work, store))
        except asyncio.TimeoutError:
            self._closed = self._failed(store, _silent(store, patience), began) or self._closed
            return None
        except StoreError as error:
            self._failed(store, error, began)
            return None
        if publishes and done is not None and not self._closed:
            self._worked(store, began)
        return done

    async def takes_artifacts(self) -> bool:
        """Look, unless it is known. A store that does not answer within seconds gets the benefit of the doubt."""
        store = self._store
        if store is None:
            return True
        if not self.faulty:
            began = self._phase
            try:
                await within(_AT_ONCE, _in_daemon(store.check))
            except asyncio.TimeoutError:
                pass
            except StoreError as error:
                self._failed(store, error, began)
        return not self.faulty

    def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
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
        if self._closed:
            stuck, self._io = self._io, ThreadPoolExecutor(8, "store")
            stuck.shutdown(wait=False)  # its threads may hang in a mount that is no more
        self._closed = False
        self._phase += 1

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
