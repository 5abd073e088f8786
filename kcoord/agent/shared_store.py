"""The store as one agent uses it: nothing waits long for it, a fault is told once, and its end too.

While it does not answer, or could not be opened yet, nobody is sent to it. After another fault (it is full, read-only, gone)
every artifact is tried, which fails at once; in either case a probe finds out in the background when it takes artifacts again.
What was not published meanwhile stays on this node.
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
from kcoord.telemetry.events import Notices

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
        self._faulty = self._closed
        self._faults = int(self._closed)
        self._probing: asyncio.Task[None] | None = None

    @property
    def faulty(self) -> bool:
        """Whether what this node compiles does not get into the store now, as far as it knows."""
        return self._faulty

    async def use(self, work: Callable[[Store], T], patience: float = PATIENCE, *, publishes: bool = False) -> T | None:
        """What ``work(store)`` returns; None if there is no store, or it does not answer, now or lately, or fails.

        Raises what else than `StoreError` `work` raises. Not guaranteed: that `work` ends when this does; its thread goes on.
        """
        store = self._store
        if store is None:
            return None
        if self._closed:
            self._probe(store)
            return None
        try:
            done = await within(patience, asyncio.get_running_loop().run_in_executor(self._io, work, store))
        except asyncio.TimeoutError:
            self._closed = True
            self._failed(store, _silent(store, patience))
            return None
        except StoreError as error:
            self._failed(store, error)
            return None
        if publishes and self._faulty and not self._closed:
            self._recovered(store)
        return done

    async def takes_artifacts(self) -> bool:
        """Look, unless it is known. A store that does not answer within seconds gets the benefit of the doubt."""
        store = self._store
        if store is None:
            return True
        if not self._faulty:
            try:
                await within(_AT_ONCE, _in_daemon(store.check))
            except asyncio.TimeoutError:
                pass
            except StoreError as error:
                self._failed(store, error)
        return not self._faulty

    def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        self._io.shutdown(wait=False, cancel_futures=True)

    def _failed(self, store: Store, error: StoreError) -> None:
        if not self._faulty:
            self._faulty, self._faults = True, self._faults + 1
        self._tell_fault(store, error)
        self._probe(store)

    def _tell_fault(self, store: Store, error: StoreError) -> None:
        if self._faults > _MOST_TOLD:
            return
        about = fault_of(store.root, error)
        self._notices.tell(
            fault_line(store, error), about=about if self._faults == 1 else f"{about} (fault {self._faults})"
        )

    def _recovered(self, store: Store) -> None:
        if self._closed:
            stuck, self._io = (
                self._io,
                ThreadPoolExecutor(8, "store"),
            )  # its threads may hang in a mount that is no more
            stuck.shutdown(wait=False)
        self._faulty = self._closed = False
        if self._faults <= _MOST_TOLD:
            self._notices.tell(
                f"the store {store.root} is back: artifacts are published there again",
                about=f"back in {store.root} {self._faults}",
            )

    def _probe(self, store: Store) -> None:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._until_back(store))

    async def _until_back(self, store: Store) -> None:
        pause = _FIRST_PROBE
        while self._faulty:
            await asyncio.sleep(pause * random.uniform(0.9, 1.1))
            pause = min(2 * pause, _SLOWEST_PROBE)
            try:
                await _in_daemon(store.check if store.opened else lambda: _opened(store))  # as long as it takes
            except StoreError as error:
                self._tell_fault(store, error)
                continue
            if self._faulty:
                self._recovered(store)


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
