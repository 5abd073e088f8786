"""Whether a process lives, told the moment it does not."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kcoord.agent.process_watch import ProcessWatch
from kcoord.packs.recipe import Recipe
from kcoord.protocol.frames import peer_of, receive_first, send_first_frame
from tests.support.agents import SOON, Node
from tests.support.cluster import start_agent
from tests.support.waiting import pause


def sleeper() -> subprocess.Popen[bytes]:
    """A process that ends when its stdin does, or when it is killed."""
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def test_a_peer_is_named_by_the_kernel() -> None:
    left, right = socket.socketpair()
    with left, right:
        assert (peer_of(left).pid, peer_of(left).uid) == (os.getpid(), os.getuid())


@pytest.mark.parametrize("how", ["kill", "terminate", "close"])
def test_the_end_of_a_process_is_told_once(how: str) -> None:
    async def watch() -> int:
        calls = 0
        told = asyncio.Event()

        def on_exit() -> None:
            nonlocal calls
            calls += 1
            told.set()

        with sleeper() as process:
            watch = ProcessWatch(process.pid, on_exit)
            assert watch.works
            await asyncio.sleep(0)
            assert not told.is_set()
            assert process.stdin is not None
            (process.stdin.close if how == "close" else getattr(process, how))()
            await asyncio.wait_for(told.wait(), 10)
        await asyncio.sleep(0.02)  # a second call would come now
        assert not watch.works
        watch.close()
        return calls

    assert asyncio.run(watch()) == 1


async def test_a_process_that_ended_before_we_looked_is_told_of_too() -> None:
    with sleeper() as process:
        process.kill()
    told = asyncio.Event()
    watch = ProcessWatch(process.pid, told.set)
    assert not watch.works
    await asyncio.wait_for(told.wait(), 10)


async def test_a_process_of_another_namespace_is_not_watched() -> None:
    told = asyncio.Event()
    watch = ProcessWatch(0, told.set)
    assert not watch.works
    await asyncio.sleep(0.02)
    assert not told.is_set()


async def test_a_kernel_without_pidfd_is_lived_with(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    told = asyncio.Event()
    watch = ProcessWatch(os.getpid(), told.set)
    assert not watch.works
    watch.close()
    await asyncio.sleep(0.02)
    assert not told.is_set()


async def test_a_watch_that_is_closed_says_nothing_and_holds_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")  # noqa: PTH208
    with sleeper() as process:
        opened = os.listdir("/proc/self/fd")  # noqa: PTH208
        told = asyncio.Event()
        watch = ProcessWatch(process.pid, told.set)
        watch.close()
        watch.close()
        assert len(os.listdir("/proc/self/fd")) == len(opened)  # noqa: PTH208
        process.kill()
    await asyncio.sleep(0.02)
    assert not told.is_set()
    assert len(os.listdir("/proc/self/fd")) == len(before)  # noqa: PTH208


ASKS_AND_DIES = """
import os, signal
from tests.support.agents import Wire
wire = Wire(client._settings.socket_path)
wire.hello()
say("connected")
request = {"id": 7, **json.loads(listen())}
wire.send(request)
os.kill(os.getpid(), signal.SIGKILL)
"""
MUCH_IS_FREE = """
import kcoord.agent.pools as pools
pools.Permits.look = lambda self: None
"""


def last_words(node: Node, agent: subprocess.Popen[bytes], request: dict[str, object]) -> None:
    """A process asks, and dies, while the agent does something else: it finds both at once."""
    rank = node.rank(ASKS_AND_DIES)
    rank.expect("connected")
    pause(agent)
    rank.tell(json.dumps(request))
    assert rank.process.wait(SOON) == -signal.SIGKILL
    agent.send_signal(signal.SIGCONT)


def test_what_a_pools_worker_took_in_its_last_moment_is_not_lost_for_others() -> None:
    recipe = Recipe("triton", "kernels", "scale", {}, "cuda:90", 1.0, 0).to_wire()
    with Node(pool_workers="1") as node:
        agent = start_agent(node, MUCH_IS_FREE)
        with node.wire() as wire:
            wire.hello()
            assert wire.ask({"op": "announce", "recipes": [recipe]})["granted"]
            last_words(node, agent, {"op": "take", "memory": 64 << 30, "idle": 9, "left": 9})
            assert wire.ask({"op": "take", "memory": 64 << 30, "idle": 9, "left": 9})["recipe"] == recipe


def test_an_agent_does_not_stay_for_a_launcher_that_attended_it_in_its_last_moment() -> None:
    with Node() as node:
        last_words(node, node.start(), {"op": "attend"})
        with node.wire() as wire:
            wire.hello()
            assert wire.ask({"op": "hand_over"})["last"]


def test_a_process_without_a_number_is_watched_by_the_descriptors_that_it_sends() -> None:
    here, there = socket.socketpair()
    command = [sys.executable, "-c", SENDS, str(there.fileno())]

    async def watch(sender: subprocess.Popen[bytes]) -> None:
        told = asyncio.Event()
        first, passed = receive_first(here)
        assert first == b"hello"
        assert not any(map(os.get_inheritable, passed))
        watch = ProcessWatch(0, told.set, passed)
        assert watch.works
        assert Path(watch.directory, "stat").read_text().startswith(f"{sender.pid} (")
        sender.kill()
        await asyncio.wait_for(told.wait(), 10)
        assert not watch.directory

    with here, there, subprocess.Popen(command, pass_fds=[there.fileno()]) as sender:
        asyncio.run(watch(sender))


SENDS = """
import socket, sys, time
from kcoord.protocol.frames import send_first_frame
send_first_frame(socket.socket(fileno=int(sys.argv[1])), b"hello")
time.sleep(600)
"""


def test_descriptors_that_cannot_be_made_or_sent_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(errno.ENOSYS, "Function not implemented")

    class Strict(socket.socket):
        def sendmsg(self, buffers: Any, ancillary: Any = (), *more: Any) -> int:
            if ancillary:
                raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
            return super().sendmsg(buffers, ancillary, *more)

    left, right = socket.socketpair()
    with Strict(fileno=left.detach()) as strict, right:
        send_first_frame(strict, b"hello")
        assert receive_first(right) == (b"hello", [])
        monkeypatch.delattr(os, "pidfd_open")  # as in a Python that was built on an old system
        monkeypatch.setattr(os, "open", refuse)
        send_first_frame(strict, b"again")
        assert receive_first(right) == (b"again", [])
