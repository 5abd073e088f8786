"""Exceptions that a signal handler of the training script raises while kcoord's code runs. They belong to the script.

Many scripts bound a step by ``signal.alarm`` and a handler that raises `TimeoutError`. Such an exception surfaces wherever the
process is, also in the middle of kcoord's own waits, where it looks like one of kcoord's errors.
"""

from __future__ import annotations

import functools
import signal
import traceback
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any


def interruption_in(error: BaseException) -> BaseException | None:
    """`error`, or the first of its causes, that was raised in a Python function which now handles a signal of this process.

    Not recognized: a handler that is written in C, or that was replaced since it raised.
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
    """Raise the script's exception, if `interruption_in` finds one in `error`: kcoord must not handle it."""
    if (interruption := interruption_in(error)) is not None:
        raise interruption from interruption.__cause__  # its cause is the script's, too


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
