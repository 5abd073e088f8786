"""The store as one agent uses it: nobody waits long for it, a fault is told once, and its end too.

While the store is silent, or could not be opened yet, nobody is sent to it. During another fault (it is full, read-only, gone)
every artifact is tried, which fails at once. A store that can be read and not written is such a fault, and serves artifacts. In
either case a probe in the background finds out when it takes artifacts again.
An artifact that is not published meanwhile stays on this node.

A few uses have a thread at a time (`kcoord.files.patience`), and a result may be old (`kcoord.files.health`).
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.files.faults import fault_of
from kcoord.files.health import Health, State
from kcoord.files.patience import NoTurn, PatientIO, Silent, in_thread, silent
from kcoord.leases.base import within
from kcoord.telemetry.events import Notices, tell_if_failed

T = TypeVar("T")

PATIENCE = 60.0  # seconds for one artifact; an NFS server's restart takes 20
_TURN_WITHIN = 60.0  # seconds before that, for its turn
_ABREAST = 8  # uses at a time
_MOST_STUCK = 200  # threads that the store has not given back; with more of them it is not used again
_GRACE = 3.0  # seconds that the uses without a thread are given after the store was found silent
_FIRST_PROBE, _SLOWEST_PROBE = 1.0, 15.0  # seconds
_MOST_TOLD = 5  # faults; a store that comes and goes does not fill the log
_AT_ONCE = 2.0  # seconds that a look at the store's state may take


class SharedStore:
    """`store` is None if there is none. One whose `open` has not returned yet is opened in the background."""

    def __init__(self, store: Store | None, notices: Notices) -> None:
        self._store, self._notices = store, notices
        opened = store is None or store.opened
        reads_only = store is not None and store.reads_only is not None
        self._health = Health(State.SILENT if not opened else State.FAULTY if reads_only else State.WELL)
        root = store.root if store is not None else Path()
        self._io = PatientIO(root, "store", abreast=_ABREAST, patience=PATIENCE, gives_up=True)
        self._io.paused = not opened
        self._overdue: set[asyncio.Future[Any]] = set()  # uses whose callers went on without them
        self._told: dict[str, int] = {}  # remedy → the latest fault of which it was told
        self._probing: asyncio.Task[None] | None = None
        self._look: asyncio.Future[None] | None = None

    @property
    def exists(self) -> bool:
        return self._store is not None

    @property
    def faulty(self) -> bool:
        """True if artifacts of this node do not get into the store now, as far as it knows."""
        return self._health.state is not State.WELL

    async def use(
        self, work: Callable[[Store], T], patience: float | None = None, *, publishes: bool = False
    ) -> T | None:
        """The result of ``work(store)``; None if there is no store, or it does not answer, now or lately, or fails.

        It takes `PATIENCE` seconds at most, after a minute in which others are at the store. With `patience` its caller goes on
        without it after so many seconds, which does not make the store faulty; until it comes after all, nobody else with
        `patience` waits. With `publishes`, any result but None says that `work` has published, and its turn is waited for until
        the store is silent. Raises any other exception of `work` than `StoreError`. Not guaranteed: that `work` ends when this
        does; its thread goes on.
        """
        store = self._store
        if store is None or (patience is not None and self._overdue):
            return None
        if self._health.state is State.SILENT:
            self._probe(store)
            return None
        began = self._health.period

        def at_the_store() -> T:
            nonlocal began
            began = self._health.period
            return work(store)

        def ended(outcome: asyncio.Future[T]) -> None:
            self._overdue.discard(outcome)
            self._learn(store, outcome, began, publishes)

        outcome = self._io.submit(at_the_store, None if publishes else _TURN_WITHIN)
        outcome.add_done_callback(ended)
        try:
            await asyncio.wait({outcome}, timeout=patience)
        except asyncio.CancelledError:
            self._io.withdraw(outcome)
            raise
        if patience is not None and not outcome.done():
            self._overdue.add(outcome)
            self._notices.tell(f"{silent(store.root, patience)}; this node goes on without it meanwhile")
            return None
        try:
            return outcome.result()
        except StoreError:
            return None

    async def takes_artifacts(self) -> bool:
        """Look, unless it is known. A store that does not answer within seconds gets the benefit of the doubt."""
        store = self._store
        if store is None:
            return True
        if not self.faulty:
            if self._look is None or self._look.done():  # else its thread may hang, as would ours
                self._look = in_thread(store.check)
            began = self._health.period
            try:
                await within(_AT_ONCE, asyncio.shield(self._look))
            except asyncio.TimeoutError:
                pass
            except StoreError as error:
                self._failed(store, error, began)
        return not self.faulty

    def close(self) -> None:
        if self._probing is not None:
            self._probing.cancel()
        self._store = None
        self._io.close()

    def _learn(self, store: Store, outcome: asyncio.Future[Any], began: int, publishes: bool) -> None:
        """The result of a use tells how the store is."""
        error = outcome.exception()
        if isinstance(error, NoTurn):
            if error.late:
                self._notices.tell(
                    f"the store {store.root} is slow: a fetch that waited {_TURN_WITHIN:g} s for its turn is given up",
                    about=f"slow {store.root}",
                )
        elif isinstance(error, StoreError):
            self._failed(store, error, began)
        elif publishes and error is None and outcome.result() is not None and self._health.state is not State.SILENT:
            self._worked(store, began)

    def _failed(self, store: Store, error: StoreError, began: int) -> None:
        """A use that began in the period `began` met `error`. After an old fault's straggler the store is looked at once more: it
        may have met the next fault.
        """
        was_silent = self._health.state is State.SILENT
        if self._health.failed(began, silent=isinstance(error, Silent)):
            self._tell_fault(store, error)
        if self._health.state is not State.SILENT:
            self._io.resume()
        elif not was_silent:
            asyncio.get_running_loop().call_later(_GRACE, self._end_waits)
        self._probe(store)

    def _end_waits(self) -> None:
        """Unless the store answers again: only a part of it hung."""
        if self._health.state is State.SILENT:
            self._io.withdraw_all()

    def _tell_fault(self, store: Store, error: StoreError) -> None:
        """Once a fault. Other writers to the store name its faults by `fault_of`, and are not to tell them again."""
        fault, earlier = self._health.faults, self._told.get(error.remedy)
        if fault > _MOST_TOLD or fault == earlier:
            return
        self._told[error.remedy] = fault
        again = f" (fault {fault})" if earlier is not None else ""
        self._notices.tell(fault_line(store, error), about=f"{fault_of(store.root, error)}{again}")

    def _worked(self, store: Store, began: int) -> None:
        """A use that began in the period `began` did everything that publishing does."""
        if not self._health.worked(began):
            return
        faults, self._look = self._health.faults, None
        if faults <= _MOST_TOLD:
            self._notices.tell(
                f"the store {store.root} is back: artifacts are published there again",
                about=f"back in {store.root} {faults}",
            )
        self._io.resume()

    def _probe(self, store: Store) -> None:
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self._until_well(store))
            # after an unexpected error the next use that fails begins another probe
            self._probing.add_done_callback(
                functools.partial(tell_if_failed, consequence="the store was not looked at", tell=self._notices.tell)
            )

    async def _until_well(self, store: Store) -> None:
        pause = _FIRST_PROBE
        while True:
            await asyncio.sleep(pause * random.uniform(0.9, 1.1))
            pause = min(2 * pause, _SLOWEST_PROBE)
            began = self._health.period
            try:
                await in_thread(store.check if store.opened else lambda: _open(store))  # as long as it takes
            except StoreError as error:
                self._failed(store, error, began)
            else:
                if self._io.stuck < _MOST_STUCK:
                    self._worked(store, began)
            if not self.faulty:
                return


def fault_line(store: Store, error: StoreError) -> str:
    """The notice of a store that cannot be used, or only be read."""
    if store.opened and store.reads_only is not None:
        return f"the store {store.root} is only read: {error.remedy}; its artifacts are used, and this node's stay here"
    return f"the store cannot be used: {store.root}: {error.remedy}; training goes on, and artifacts stay on this node"


def _open(store: Store) -> None:
    store.open()
    store.check()


async def opened(store: Store, patience: float, notices: Notices) -> None:
    """Open `store` within `patience` seconds; if that fails it is told, and a `SharedStore` goes on trying."""
    fault: StoreError
    try:
        await within(patience, in_thread(store.open))
    except StoreError as error:
        fault = error
    except asyncio.TimeoutError:
        fault = silent(store.root, patience)
    else:
        if store.reads_only is None:
            return
        fault = store.reads_only
    notices.tell(fault_line(store, fault), about=fault_of(store.root, fault))
