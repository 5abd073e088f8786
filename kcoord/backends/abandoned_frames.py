"""Compilations that their compiler abandoned: it raised, and did not tell its cache.

They are ended in two ways. `wrap` wraps the compiler's entry point: if it raises, the compilations that it began end. An entry
point may have been imported before it was wrapped; so a thread watches the frame that asked, and ends its compilation once the
frame has left its thread's stack. It looks once more at exit, because an exception may end the process sooner.

The trade: while such a compilation is pending, a look every 20 ms walks one thread's stack; without it, other ranks would wait
for the compile until the process ends.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from kcoord.backends.wrapping import wraps
from kcoord.interruption import let_through
from kcoord.rank.compilation import Compilation

_LOOK_EVERY = 0.02  # seconds between two looks of the watch


@dataclass
class _Pending:
    """A compilation that its thread has not published yet. `frame` asked for it."""

    compilation: Compilation
    frame: FrameType
    thread: int = field(default_factory=threading.get_ident)


_pending: dict[int, _Pending] = {}
# protects _pending and the start of the watch; a signal's handler may compile while its thread is in here
_pending_lock = threading.RLock()
_watching = False


def _forget_after_fork() -> None:
    """The parent ends its own compilations; a child's exit does not."""
    global _watching, _pending_lock
    _pending_lock, _watching = threading.RLock(), False
    _pending.clear()


os.register_at_fork(after_in_child=_forget_after_fork)


def register(compilation: Compilation, frame: FrameType) -> None:
    """Watch over `compilation` until `unregister`; `frame` is the compiler's, which asked for it."""
    global _watching
    _look_at_exit()
    with _pending_lock:
        _pending[id(compilation)] = _Pending(compilation, frame)
        if not _watching:
            try:
                threading.Thread(target=_watch, name="kcoord-abandoned", daemon=True).start()
                _watching = True
            except RuntimeError as error:  # this user may have no more threads: the next compile tries again
                let_through(error)


def unregister(compilation: Compilation) -> None:
    with _pending_lock:
        _pending.pop(id(compilation), None)


def _watch() -> None:
    """Look for abandoned compilations until nothing is pending."""
    global _watching
    while True:
        time.sleep(_LOOK_EVERY)
        with _pending_lock:
            if not _pending:
                _watching = False
                return
        _fail_abandoned()


def _fail_abandoned() -> None:
    """Fail every compilation whose asking frame has left its thread's stack."""
    with _pending_lock:
        waiting = list(_pending.values())
    stacks = sys._current_frames()
    for pending in waiting:
        if not _is_on(pending.frame, stacks.get(pending.thread)):
            unregister(pending.compilation)
            pending.compilation.fail("the compiler raised an exception; the rank that compiled has its traceback")


@functools.lru_cache(maxsize=1)
def _look_at_exit() -> None:
    """Look once more at exit. Register after the coordinator, which closes at exit, too: the last registered runs first."""
    atexit.register(_fail_abandoned)


def _is_on(frame: FrameType, top: FrameType | None) -> bool:
    while top is not None:
        if top is frame:
            return True
        top = top.f_back
    return False


def _failed(before: set[int], error: BaseException) -> None:
    """A wrapped compile of this thread raised: end the compilations that it began and did not publish."""
    thread = threading.get_ident()
    with _pending_lock:
        mine = [p for number, p in _pending.items() if p.thread == thread and number not in before]
        for pending in mine:
            _pending.pop(id(pending.compilation), None)
    for pending in mine:
        pending.compilation.raised(error)


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """The entry point `original`; if it raises, the compilations that were begun inside end."""

    @wraps(original)
    def compile(*args: Any, **kwargs: Any) -> Any:
        with _pending_lock:
            before = set(_pending)
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            _failed(before, error)
            raise

    return compile
