"""A script that bounds its steps by signals keeps its exceptions, wherever kcoord is at that moment."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kcoord.backends.base import fails_open
from kcoord.interruption import is_interruption


def raises(number: int, frame: Any) -> None:
    raise TimeoutError("the step took too long")


class Watchdog:
    def __call__(self, number: int, frame: Any) -> None:
        raise TimeoutError("the step took too long")

    def bark(self, number: int, frame: Any) -> None:
        self(number, frame)


def with_more(more: str, number: int, frame: Any) -> None:
    raises(number, frame)


HANDLERS = [raises, Watchdog(), Watchdog().bark, functools.partial(with_more, "more")]


@contextlib.contextmanager
def handled_by(handler: Callable[[int, Any], Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)


def alarm() -> None:
    os.kill(os.getpid(), signal.SIGALRM)


@pytest.mark.parametrize("handler", HANDLERS, ids=["a function", "an object", "a method", "a partial"])
def test_what_a_signal_handler_raises_is_known_from_our_own_errors(handler: Callable[[int, Any], Any]) -> None:
    with handled_by(handler):
        with pytest.raises(TimeoutError) as caught:
            alarm()
        assert is_interruption(caught.value)
        assert not is_interruption(TimeoutError("ours, not raised yet"))
        with pytest.raises(TimeoutError) as caught:
            raise TimeoutError("ours")
        assert not is_interruption(caught.value)


def test_a_hook_lets_the_scripts_own_exception_through_and_no_error_of_kcoord() -> None:
    @fails_open(lambda: "as without kcoord")
    def hook(work: Callable[[], None] = alarm) -> str:
        work()
        return "done"

    with handled_by(raises), pytest.raises(TimeoutError, match="the step"):
        hook()

    @fails_open(lambda: "as without kcoord")
    def broken() -> str:
        raise TimeoutError("an error of kcoord")

    with handled_by(raises):
        assert broken() == "as without kcoord"
