"""Work that may hang in a dead file server: in a thread that nobody joins. Without asyncio, whose import costs a rank time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from kcoord.errors import KcoordError, StoreError

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
