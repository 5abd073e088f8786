"""A rank and its agent in two pid namespaces, as a trainer and a sidecar of one pod: the agent has no number for the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from tests.support.agents import Node, Rank

APART = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
STALL = 1.0  # seconds
LEADS = """
import subprocess, sys, time
from ctypes import PyDLL
lead = claim(client, "key")
"""


@pytest.fixture
def node() -> Iterator[Node]:
    if subprocess.run([*APART, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make pid namespaces")
    with Node(stall_seconds=str(STALL)) as node:
        node.start("--parent", "0", wrap=APART)
        yield node


def waiter(node: Node) -> Rank:
    rank = node.rank("claim(client, 'key')")
    node.until_waiting("key", 1)
    return rank


def test_a_killed_leader_whose_socket_a_child_keeps_is_followed_within_a_second(node: Node) -> None:
    first = node.rank(
        f"""{LEADS}
say("forked", child=PyDLL(None).fork())  # as a C library forks: no hook of Python's closes the child's copy
time.sleep(600)
"""
    )
    first.expect("Lead")
    child = max(first.expect("forked")["child"], first.expect("forked")["child"])
    second, killed = waiter(node), first.kill()
    try:
        second.expect("Lead")
        assert time.monotonic() - killed < STALL
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_leader_that_hangs_is_followed(node: Node) -> None:
    first = node.rank(f"{LEADS}\nlisten()")
    first.expect("Lead")
    waiter(node).expect("Lead", within=10 * STALL)


def test_a_leader_whose_compiler_is_a_busy_child_keeps_its_lead(node: Node) -> None:
    first = node.rank(
        f"""{LEADS}
compiler = subprocess.Popen([sys.executable, "-c", "while True: pass"])
listen()
compiler.kill()
compiler.wait()
say("published", well=publish(client, lead, "key"))
"""
    )
    first.expect("Lead")
    second = waiter(node)
    with pytest.raises(AssertionError, match="did not say"):
        second.expect("anything", within=4 * STALL)
    first.tell()
    assert first.expect("published") == {"well": True}
    second.expect("Ready")
