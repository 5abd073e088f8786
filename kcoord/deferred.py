"""Work that is done a little later, once for all who ask for it in the meantime."""

from __future__ import annotations

import threading
from collections.abc import Callable

from kcoord.interruption import let_through


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
