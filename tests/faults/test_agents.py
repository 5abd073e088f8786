"""The agent is killed, paused, flooded, doubled or without a disk: no rank waits longer than its bound, and all are served."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import psutil
import pytest

from kcoord.rank import client as rank_client
from kcoord.rank.client import Alone, Lead, Ready
from tests.support.agents import Node, end_agent, in_thread, key_of, stage, until, watching
from tests.support.interpose import Interposer
from tests.support.redis_server import RedisServer
from tests.support.waiting import pause

PATIENCE = 1.5  # seconds: KCOORD_AGENT_TIMEOUT of ranks here
BOUND = 1.75 * PATIENCE  # who waits twice where once was enough is beyond it

FILES = 48  # of 1 MiB: an artifact that takes a while to publish


@pytest.fixture
def node() -> Iterator[Node]:
    with Node(agent_timeout=str(PATIENCE)) as node:
        yield node


@pytest.fixture
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that was found dead is asked again after less than the 5 seconds of every day."""
    monkeypatch.setattr(rank_client, "_RETRY_AFTER", 0.3)


def timed(work: Future[Any]) -> tuple[Any, float]:
    begun = time.monotonic()
    return work.result(60), time.monotonic() - begun


def large(node: Node, name: str) -> Path:
    staging = stage(node.home(name))
    for number in range(FILES):
        (staging / f"{number}.bin").write_bytes(os.urandom(1 << 20))
    return staging


def is_whole(node: Node, name: str) -> bool:
    return node.read(name) == "a kernel" and len(list(node.home(name).glob("*.bin"))) == FILES


# Killed.


@pytest.mark.smoke
def test_an_agent_that_is_killed_while_it_publishes_loses_nothing(node: Node, interposer: Interposer) -> None:
    agent = node.start(environ=interposer.environ)
    client = node.client()
    lead = node.lead(client, "k")
    waiting = node.claiming(node.client(), "k")
    node.until_waiting("k", 1)
    staging = large(node, "k")
    publishes = interposer.stall("rename", below=node.home("k"), seconds=60, times=1)
    publishing = in_thread(lambda: client.publish(lead, key_of("k"), staging, node.home("k"), 0.5, ""))
    until(lambda: publishes.hits)
    agent.kill()
    agent.wait()
    assert publishing.result(30) is True, "the agent's successor finished it"
    assert is_whole(node, "k")
    answer = waiting.result(30)
    if isinstance(answer, Lead):  # it asked the new agent before that had the artifact
        assert node.publish(client, answer, "k")
    else:
        assert isinstance(answer, Ready)
    assert is_whole(node, "k"), "of two copies the first stays"
    assert not list((node.home("k").parent / ".kcoord" / "staging").iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_whoever_asks_while_one_agent_ends_and_the_next_one_starts_is_served(number: int) -> None:
    """Daemons, which ranks start: the old one removes its socket while the new one's is made."""
    with Node(agent_timeout="20") as node:  # a busy machine starts agents slowly
        clients = [node.client() for _ in range(4)]
        for round_ in range(4):
            assert clients[0].status()
            (pid,) = node.agent_pids()
            names = [f"{round_}.{n}" for n in range(len(clients))]
            asked = [node.claiming(c, name) for c, name in zip(clients, names, strict=True)]
            os.kill(pid, number)
            asked += [node.claiming(c, f"{name}.late") for c, name in zip(clients, names, strict=True)]
            for claim, client, name in zip(asked, clients * 2, [*names, *(f"{n}.late" for n in names)], strict=True):
                answer = claim.result(30)
                assert isinstance(answer, Lead), (name, answer)
                assert node.publish(client, answer, name)
            until(lambda: len(node.agent_pids()) == 1)
        assert clients[0].status()


# Paused.


@pytest.mark.serial
@pytest.mark.usefixtures("soon_again")
def test_a_paused_agent_holds_up_nobody_for_longer_than_the_time_out_and_is_used_again(node: Node) -> None:
    """Those who wait, who lead, who ask, and who publish."""
    agent = node.start()
    leader, waiter, asker = node.client(), node.client(), node.client()
    lead = node.lead(leader, "k")
    waiting = node.claiming(waiter, "k")
    node.until_waiting("k", 1)
    staging = large(node, "k")
    pause(agent)
    begun = time.monotonic()
    publishing = in_thread(lambda: leader.publish(lead, key_of("k"), staging, node.home("k"), 0.5, ""))
    asking = node.claiming(asker, "new")
    assert isinstance(waiting.result(60), Alone)
    assert isinstance(asking.result(60), Alone)
    assert publishing.result(60) is False
    assert time.monotonic() - begun < BOUND
    agent.send_signal(signal.SIGCONT)
    until(lambda: node.status()["flights"] == [])  # those who gave up are gone from it
    until(lambda: asker.status(quietly=True) is not None)
    again = node.claim(asker, "new")
    assert isinstance(again, Lead), "it is used again"
    assert node.publish(asker, again, "new")
    assert node.claim(asker, "k") == Ready("store"), "what was handed to it was not lost"
    assert is_whole(node, "k")


def test_a_paused_agent_s_lease_ends_and_its_late_publish_harms_nothing(tmp_path: Path) -> None:
    with RedisServer() as server:
        shared = {"redis_url": server.url, "store": str(tmp_path), "lease_ttl": "1"}
        with Node(**shared) as one, Node(**shared) as two:
            agent = one.start()
            two.start()
            leader, heir = one.client(), two.client()
            lead = one.claim(leader, "k")
            waiting = two.claiming(heir, "k")
            two.until_waiting("k", 1)
            pause(agent)
            inherited = waiting.result(30)
            assert isinstance(inherited, Lead)
            assert two.publish(heir, inherited, "k")
            agent.send_signal(signal.SIGCONT)
            assert one.publish(leader, lead, "k")
            until(lambda: one.status()["flights"] == two.status()["flights"] == [])
            assert one.read("k") == two.read("k") == "a kernel"


# Flooded.

FLOOD = """
import resource, socket
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
path, made = str(Settings.from_environ().socket_path), []
try:
    while True:
        caller = socket.socket(socket.AF_UNIX)
        caller.setblocking(False)
        caller.connect(path)
        made.append(caller)
except BlockingIOError:
    say("full", callers=len(made))
except OSError as error:
    say("full", callers=0, why=str(error))
listen()
for caller in made:
    caller.close()
say("gone")
"""


@pytest.fixture
def few_files() -> Iterator[None]:
    """The soft limit that most systems have; who is started meanwhile inherits it."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.serial
@pytest.mark.usefixtures("few_files")
def test_a_queue_full_of_callers_delays_a_rank_by_the_time_out_at_most(node: Node) -> None:
    agent = node.start()
    client = node.client(spawn="0")
    node.status()
    pause(agent)
    flood = node.rank(FLOOD)
    full = flood.expect("full")
    try:
        if not full["callers"]:
            pytest.skip(f"this user may not open enough files: {full['why']}")
        assert full["callers"] > 1000 or full["callers"] >= int(Path("/proc/sys/net/core/somaxconn").read_text()), (
            "the agent let in fewer than the system allows"
        )
        answer, took = timed(node.claiming(client, "k"))
        assert isinstance(answer, Alone)
        assert took < BOUND
        time.sleep(0.5)  # the rank compiles
        answer, took = timed(node.claiming(client, "next"))
        assert isinstance(answer, Alone)
        assert took < PATIENCE / 2, "each kernel costs the time-out"
    finally:
        agent.send_signal(signal.SIGCONT)
    # none of them says hello, none has gone: another client is served all the same
    other = node.client()
    lead = other.claim(key_of("k"), node.home("k"))
    assert isinstance(lead, Lead)
    assert node.publish(other, lead, "k")
    flood.tell()
    flood.expect("gone")
    until(lambda: psutil.Process(agent.pid).num_fds() < 100)


# Two at once, and none that can write.


def test_two_agents_at_one_path_serve_whoever_reached_them(node: Node) -> None:
    """As after somebody removed the socket's file: the first one's ranks stay with it, later ones find the second."""
    first = node.start()
    early = node.client()
    lead = node.lead(early, "k")
    waiting = node.claiming(node.client(), "k")
    node.until_waiting("k", 1)
    second = node.start()
    late = node.client()
    there = node.claim(late, "k")
    assert isinstance(there, Lead), "two agents, two compiles, without a lease service between them"
    assert node.publish(late, there, "k")
    assert node.publish(early, lead, "k")
    assert waiting.result(30) == Ready("wait")
    end_agent(first.pid)
    assert node.path.exists(), "the first one's end leaves the second one's socket"
    assert node.status()["pid"] == second.pid
    assert node.claim(early, "k") == Ready("store")


def test_an_agent_whose_log_is_on_a_full_disk_serves_and_ends_in_order(node: Node) -> None:
    node.path.with_suffix(".log").symlink_to("/dev/full")
    client = node.client()
    assert client.status()
    (pid,) = node.agent_pids()
    log = Path(f"/proc/{pid}/fd/2").readlink()
    assert str(log) == "/dev/full"
    empty = stage(node.home("empty"))
    (empty / "kernel.txt").unlink()
    assert not client.publish(None, key_of("empty"), empty, node.home("empty"), 0.5, ""), (
        "and has something to say of it"
    )
    assert any("wrote no file" in line for line in node.status()["notices"])
    lead = node.lead(client, "k")
    assert node.publish(client, lead, "k")
    end_agent(pid)
    assert not node.path.exists()


def test_an_agent_whose_log_cannot_be_made_is_started_without(node: Node) -> None:
    node.path.with_suffix(".log").mkdir()
    client = node.client()
    assert client.status()
    (pid,) = node.agent_pids()
    assert os.fspath(Path(f"/proc/{pid}/fd/2").readlink()) == os.devnull


def test_a_node_s_directory_that_vanishes_lets_its_agent_end_and_its_ranks_go_on() -> None:
    with Node(idle_timeout="0.5") as node:
        client = node.client()
        assert client.status()
        (pid,) = node.agent_pids()
        with watching(pid) as ended:
            shutil.rmtree(node.directory)
            answer = node.lead(client, "k")
            assert node.publish(client, answer, "k"), "it is made again"
            client.close()
            assert ended(20)
