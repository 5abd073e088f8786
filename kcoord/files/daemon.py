"""Work in a thread that nobody joins, at once or a little later. Without asyncio, whose import costs a rank time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kcoord.errors import KcoordError, StoreError
from kcoord.interruption import let_through

T = TypeVar("T")


def in_daemon(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread of its own that nobody joins, so a dead NFS server may hold it for ever.

    The future raises the OSError or `KcoordError` of `work`; after any other error, whose traceback is printed, `StoreError`.
    """
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()

    def run() -> None:
        failure: Exception = StoreError("an error in kcoord; its log has it", passing=True)
        try:
            outcome.set_result(work())
        except (OSError, KcoordError) as error:
            failure = error
        finally:
            if not outcome.done():
                outcome.set_exception(failure)

    threading.Thread(target=run, daemon=True).start()
    return outcome


class Deferred:
    """Calls ``work()`` in a daemon thread, `seconds` after the first `begin` since the last call.

    Not guaranteed: that it is called, if the process ends before, or may have no more threads.
    """

    def __init__(self, seconds: float, work: Callable[[], object]) -> None:
        self._seconds, self._work = seconds, work
        self._timer: threading.Timer | None = None

    def begin(self) -> None:
        if self._timer is None:
            timer = self._timer = threading.Timer(self._seconds, self._run)
            timer.daemon = True
            try:
                timer.start()
            except RuntimeError as error:  # this user may have no more threads, or the interpreter ends
                self._timer = None
                let_through(error)

    def end(self, within: float) -> None:
        """Withdraw a call that has not begun; wait up to `within` seconds for one that has. The next `begin` counts anew."""
        timer, self._timer = self._timer, None
        if timer is not None and timer is not threading.current_thread():
            timer.cancel()
            if timer.is_alive():
                timer.join(within)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._timer = None  # not before: `end` waits for the call
