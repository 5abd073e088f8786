"""A script that bounds its steps by signals keeps its exceptions, wherever kcoord is at that moment."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts import local
from kcoord.backends import abandoned_frames
from kcoord.backends.fail_open import fails_open
from kcoord.interruption import interruption_in
from kcoord.rank import spawn
from kcoord.rank.client import AgentClient, Lead
from kcoord.rank.coordinator import Compilation, Coordinator, Request
from kcoord.rank.directories import Directories
from kcoord.rank.telemetry import RankTelemetry
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from tests.support.agents import Node, key_of
from tests.support.sandbox import Sandbox, eventually


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
        error = ValueError("a script may raise it from itself")
        error.__cause__ = error
        assert interruption_in(error) is None


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
            waiter.claim(key, home, while_waiting=timer.start)
        timer.join()
        assert waiter.status() is not None, "and the agent is not taken for dead"
        leader.give_up(lead, key)


def test_an_alarm_that_goes_off_while_an_agent_is_looked_for_is_the_scripts_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(path: Path, timeout: float) -> socket.socket:
        alarm()
        raise AssertionError("the alarm has raised")

    monkeypatch.setattr(spawn, "connect", connect)
    client = AgentClient(Settings.from_environ({"KCOORD_LOCAL_DIR": str(tmp_path)}), Notices())
    for ask in (lambda: client.claim(key_of("kernel"), tmp_path / "kernel"), lambda: client.status()):
        with handled_by(raises), pytest.raises(TimeoutError, match="the step"):
            ask()


def write(staging: Path) -> None:
    (staging / "kernel.bin").write_bytes(b"code")


def interrupted(staging: Path) -> None:
    write(staging)
    alarm()


def test_an_alarm_in_the_middle_of_a_compile_says_nothing_about_the_kernel_to_the_other_ranks() -> None:
    with Node() as node:
        node.start()
        first, other = Coordinator(node.settings), Coordinator(node.settings)
        with handled_by(raises), pytest.raises(TimeoutError, match="the step"):
            first.get_or_compile(key_of("kernel"), interrupted)
        other.get_or_compile(key_of("kernel"), write)  # no CompileFailed, which would end its job
        assert other.counters.read()["compiles"] == 1
        first.close()
        other.close()


def test_where_no_thread_may_be_started_a_compile_goes_on_and_the_next_one_is_watched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    coordinator = Coordinator(Settings.from_environ({"KCOORD_LOCAL_DIR": str(tmp_path), "KCOORD_SPAWN": "0"}))
    eventually(lambda: not abandoned_frames._watching)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        for number in range(2):
            compiling = coordinator.private(key_of(str(number)), tmp_path / str(number))
            abandoned_frames.register(compiling, sys._getframe())
            abandoned_frames.unregister(compiling)
    watched = coordinator.private(key_of("watched"), tmp_path / "watched")

    def compiles() -> None:
        abandoned_frames.register(watched, sys._getframe())

    compiles()
    eventually(lambda: watched.ended, what="its frame has gone")
    coordinator.close()


def test_an_alarm_in_the_middle_of_a_wrapped_compiler_leaves_the_kernel_to_the_next_rank() -> None:
    with Node() as node:
        node.start()
        first, other = Coordinator(node.settings), Coordinator(node.settings)
        asked = Request(key_of("kernel"), node.directory / "kernel")

        def compiler(work: Callable[[Path], None]) -> None:
            found = first.request(asked)
            assert isinstance(found, Compilation)
            abandoned_frames.register(found, sys._getframe())
            work(found.staging)

        with handled_by(raises), pytest.raises(TimeoutError, match="the step"):
            abandoned_frames.wrap(compiler)(interrupted)
        found = other.request(asked)
        assert isinstance(found, Compilation)
        assert found.lead is not None
        assert found.failed is None
        found.give_up()
        first.close()
        other.close()


def test_an_alarm_while_an_artifact_is_read_is_the_scripts_and_the_artifact_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Node() as node:
        node.start()
        coordinator = Coordinator(node.settings)
        artifact = coordinator.get_or_compile(key_of("kernel"), write)
        coordinator.close()

        def read_plain(*args: Any, **kwargs: Any) -> bytes:
            alarm()
            raise AssertionError("the alarm has raised")

        monkeypatch.setattr(local, "read_plain", read_plain)
        with handled_by(raises), pytest.raises(TimeoutError, match="the step"):
            coordinator.find(artifact.key, artifact.path)
        monkeypatch.undo()
        assert coordinator.find(artifact.key, artifact.path) is not None


def test_an_alarm_while_the_local_directory_is_looked_at_is_the_scripts_and_does_not_turn_kcoord_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = Coordinator(Settings.from_environ({"KCOORD_LOCAL_DIR": str(tmp_path)}))
    monkeypatch.setattr(Path, "mkdir", lambda *args, **how: alarm())
    with handled_by(raises), pytest.raises(TimeoutError, match="the step"):
        _ = coordinator.usable
    monkeypatch.undo()
    assert coordinator.usable


@pytest.mark.parametrize(
    "within",
    [(RankTelemetry, "waited"), (local, "has_room"), (Directories, "is_shared")],
    ids=["it is to lead", "it begins", "it ends"],
)
def test_an_alarm_as_a_compile_begins_or_ends_is_the_scripts_and_the_next_rank_leads(
    monkeypatch: pytest.MonkeyPatch, within: tuple[Any, str]
) -> None:
    def interrupts(*args: Any) -> None:
        alarm()

    def compiles() -> None:
        found = first.request(asked)
        assert isinstance(found, Compilation)
        write(found.staging)
        found.publish()

    with Node() as node:
        node.start()
        first, other = Coordinator(node.settings), Coordinator(node.settings)
        asked = Request(key_of("kernel"), node.directory / "kernel")
        assert first.usable
        monkeypatch.setattr(*within, interrupts)
        with handled_by(raises), pytest.raises(TimeoutError, match="the step") as kept:
            compiles()
        monkeypatch.undo()
        found = other.request(asked)
        assert isinstance(found, Compilation)
        assert found.lead is not None
        del kept  # with its frames, and what they hold
        found.give_up()
        first.close()
        other.close()


def test_a_rank_that_is_interrupted_before_it_hands_in_holds_up_nobody_though_the_script_keeps_the_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class TooSlow(Exception):
        pass

    def too_slow(number: int, frame: Any) -> None:
        raise TooSlow

    def is_shared(staging: Path) -> bool:
        alarm()
        raise AssertionError("the alarm has raised")

    with Node() as node:
        node.start()
        first, other = Coordinator(node.settings), Coordinator(node.settings)
        asked = Request(key_of("kernel"), node.directory / "kernel")
        led = first.request(asked)
        assert isinstance(led, Compilation)
        write(led.staging)
        monkeypatch.setattr(led.context.directories, "is_shared", is_shared)
        with handled_by(too_slow), pytest.raises(TooSlow):
            led.publish()
        monkeypatch.undo()
        found = other.request(asked)
        assert isinstance(found, Compilation)
        assert found.lead is not None
        found.give_up()
        first.close()
        other.close()


COMPILES_IN_ITS_HANDLER = """
import itertools, signal
import kcoord
coordinator = kcoord.connect()
numbers, handled = itertools.count(), 0

def use():
    fresh = kcoord.CacheKey.of("test", str(next(numbers)))
    for key in (kcoord.CacheKey.of("test", "hot"), fresh, fresh):
        kcoord.connect().get_or_compile(key, lambda staging: (staging / "a").touch())

def save_a_checkpoint(number, frame):
    global handled
    handled += 1
    use()
    signal.setitimer(signal.ITIMER_REAL, 1e-4)

use()
signal.signal(signal.SIGALRM, save_a_checkpoint)
signal.setitimer(signal.ITIMER_REAL, 1e-4)
while handled < 150:
    coordinator.get_or_compile(kcoord.CacheKey.of("test", "hot"), lambda staging: None)
    coordinator.counters.read()
signal.signal(signal.SIGALRM, signal.SIG_IGN)
coordinator.close()
print("done")
"""


def test_a_signal_handler_that_uses_kernels_never_waits_for_the_thread_that_it_interrupted(sandbox: Sandbox) -> None:
    """As one does that saves a checkpoint where it is told that the job is pre-empted."""
    done = sandbox.run("-c", COMPILES_IN_ITS_HANDLER, timeout=60, KCOORD_MEMORY_ENTRIES="3")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_what_the_script_raised_its_exception_from_stays_with_it() -> None:
    why = ValueError("the loss is no number")

    def with_a_cause(number: int, frame: Any) -> None:
        raise TimeoutError("the step took too long") from why

    @fails_open(lambda: None)
    def hook() -> None:
        alarm()

    with handled_by(with_a_cause), pytest.raises(TimeoutError) as caught:
        hook()
    assert caught.value.__cause__ is why
