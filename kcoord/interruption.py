"""Exceptions that are none of ours: what a signal handler of the training script raised while kcoord was at work.

``signal.alarm`` and a handler that raises `TimeoutError` are how many scripts bound a step. Such an exception appears wherever the
process happens to be, in the middle of our own wait too, and looks like one of our own errors there. It belongs to the script.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from types import CodeType
from typing import Any


def is_interruption(error: BaseException) -> bool:
    """Whether `error` came out of a Python function that handles a signal of this process now.

    Not guaranteed: that a handler is recognized which is written in C, or was replaced since it raised.
    """
    handlers = set(_handlers())
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in handlers:
            return True
        trace = trace.tb_next
    return False


def _handlers() -> Iterator[CodeType]:
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while isinstance(handler, functools.partial):
            handler = handler.func
        if handler is signal.default_int_handler or not callable(handler):
            continue
        handler = getattr(handler, "__func__", handler)  # of a method
        code = getattr(handler, "__code__", None) or getattr(getattr(type(handler), "__call__", None), "__code__", None)
        if isinstance(code, CodeType):
            yield code
