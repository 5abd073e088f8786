"""A script that bounds its steps by signals keeps its exceptions, wherever kcoord is at that moment."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kcoord.agent import spawn
from kcoord.agent.client import AgentClient, Lead
from kcoord.backends.base import fails_open
from kcoord.interruption import interruption_in
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from tests.agents import Node, key_of


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
        assert interruption_in(caught.value) is caught.value
        assert interruption_in(TimeoutError("ours, not raised yet")) is None
        with pytest.raises(TimeoutError) as caught:
            raise TimeoutError("ours")
        assert interruption_in(caught.value) is None


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


def test_a_script_that_bounds_a_step_by_an_alarm_hears_it_while_it_waits_for_another_rank(tmp_path: Path) -> None:
    with Node() as node:
        node.start()
        leader, waiter = node.client(), node.client()
        key, home = key_of("kernel"), node.directory / "kernel"
        lead = leader.claim(key, home)
        assert isinstance(lead, Lead)
        timer = threading.Timer(0.2, alarm)
        with handled_by(raises), pytest.raises(TimeoutError, match="the step"):
            waiter.claim(key, home, meanwhile=timer.start)
        timer.join()
        assert waiter.ask({"op": "status"}) is not None, "and the agent is not taken for dead"
        leader.give_up(lead, key)


def test_an_alarm_that_goes_off_while_an_agent_is_looked_for_is_the_scripts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(path: Path, timeout: float) -> socket.socket:
        alarm()
        raise AssertionError("the alarm has raised")

    monkeypatch.setattr(spawn, "connect", connect)
    client = AgentClient(Settings.from_environ({"KCOORD_LOCAL_DIR": str(tmp_path)}), Notices())
    for ask in (lambda: client.claim(key_of("kernel"), tmp_path / "kernel"), lambda: client.ask({"op": "status"})):
        with handled_by(raises), pytest.raises(TimeoutError, match="the step"):
            ask()
