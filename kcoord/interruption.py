"""Exceptions that are none of ours: what a signal handler of the training script raised while kcoord was at work.

``signal.alarm`` and a handler that raises `TimeoutError` are how many scripts bound a step. Such an exception appears wherever
the process happens to be, in the middle of our own wait too, and looks like one of our own errors there. It is the script's.
"""

from __future__ import annotations

import functools
import signal
import traceback
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any


def interruption_in(error: BaseException) -> BaseException | None:
    """`error`, or what it was raised from, if that came out of a Python function that handles a signal of this process now.

    Not guaranteed: that a handler is recognized which is written in C, or was replaced since it raised.
    """
    handlers, seen = set(_handlers()), set()
    found: BaseException | None = error
    while found is not None and id(found) not in seen:  # a script may raise an exception from itself
        if any(frame.f_code in handlers for frame, _ in traceback.walk_tb(found.__traceback__)):
            return found
        seen.add(id(found))
        found = found.__cause__
    return None


def let_through(error: BaseException) -> None:
    """Raise what `interruption_in` finds, if it finds something: it is not ours to handle."""
    if (interruption := interruption_in(error)) is not None:
        raise interruption from interruption.__cause__  # which is the script's, too


def _handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if handler is signal.default_int_handler or not callable(handler):
            continue
        if not isinstance(handler, (FunctionType, MethodType)):
            handler = type(handler).__call__
        code = getattr(handler, "__code__", None)
        if isinstance(code, CodeType):
            yield code
