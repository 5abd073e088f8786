"""A rank's side: many threads, forks, agents that come and go, and no agent at all."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kcoord.keys.cache_key import CacheKey
from kcoord.protocol import endpoint, fields, frames, messages
from kcoord.protocol.own_socket import OwnSocket
from kcoord.rank import client as rank_client
from kcoord.rank.client import AgentClient, Alone, Lead, Ready
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from tests.support.agents import Node, hits, key_of, stage, until
from tests.support.sandbox import Sandbox
from tests.support.waiting import pause

THREADS = 16


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        node.start()
        yield node


RESTORED_SIGPIPE = """
import signal, socket
from kcoord.rank.client import AgentClient
from kcoord.protocol.own_socket import OwnSocket
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as scripts do whose output is piped into another program
client = AgentClient(Settings.from_environ(), Notices())
ours, theirs = socket.socketpair()
theirs.close()
client._give_back(OwnSocket(ours))
print(client.status())
"""


@pytest.mark.smoke
def test_an_agent_that_has_gone_does_not_end_a_rank_that_restored_sigpipe(sandbox: Sandbox) -> None:
    done = sandbox.run("-c", RESTORED_SIGPIPE, KCOORD_SPAWN="0")
    assert (done.returncode, done.stdout) == (0, "None\n"), done.stderr


@pytest.mark.parametrize("answer", [{}, {"op": 1}, {"op": "done", "told": 1}])
def test_an_answer_that_is_none_is_as_good_as_no_agent(answer: dict[str, object], sandbox: Sandbox) -> None:
    client = AgentClient(Settings.from_environ(sandbox.env(KCOORD_SPAWN="0")), Notices())
    ours, theirs = socket.socketpair()
    client._give_back(OwnSocket(ours))
    theirs.sendall(frames.encode_frame(answer))
    assert isinstance(client.claim(key_of("k"), sandbox.root / "k"), Alone)
    theirs.close()


# Threads.


def test_a_long_wait_holds_up_no_other_thread(node: Node) -> None:
    client = node.client()
    lead = node.claim(client, "slow")
    waiting = node.claiming(client, "slow")
    node.until_waiting("slow", 1)
    other = node.claim(client, "quick")
    assert node.publish(client, other, "quick")
    assert not waiting.done()
    assert node.publish(client, lead, "slow")
    assert waiting.result(20) == Ready("wait")


# Forks.

FORK = """
import os, time
lead = claim(client, "k")
client.status()  # an idle connection, too
child = os.fork()
if child == 0:
    %s
    os._exit(0)
listen()
os.waitpid(child, 0)
listen()
say("published", well=publish(client, lead, "k"))
"""


INTERRUPTED = """
import signal

class TooLong(Exception):
    pass

def ring(number, frame):
    raise TooLong

signal.signal(signal.SIGALRM, ring)
try:
    claim(client, "k")
except TooLong as error:
    kept = error  # and with it every frame that it passed through, as a notebook or a log does
    say("interrupted")
listen()
"""


def test_a_wait_that_was_interrupted_is_not_led_to(node: Node) -> None:
    client = node.client()
    lead = node.lead(client, "k")
    interrupted = node.rank(INTERRUPTED)
    node.until_waiting("k", 1)
    heir = node.claiming(node.client(), "k")
    node.until_waiting("k", 2)
    os.kill(interrupted.pid, signal.SIGALRM)
    interrupted.expect("interrupted")
    client.give_up(lead, key_of("k"))
    leads = heir.result(20)
    assert isinstance(leads, Lead), "the first who waited compiles nothing"
    client.give_up(leads, key_of("k"))


@pytest.mark.parametrize("ends", ["pass", "client.close(); __import__('sys').exit(0)"], ids=["at once", "in order"])
def test_the_end_of_a_forked_child_does_not_end_its_parent_s_lead(node: Node, ends: str) -> None:
    parent = node.rank(FORK % ends)
    parent.expect("Lead")
    waiting = node.claiming(node.client(), "k")
    node.until_waiting("k", 1)
    parent.tell()
    assert node.status()["clients"] == 4, "the parent's two, the waiter's, and ours"
    assert str(parent.pid) in node.flight("k")["leader"]
    parent.tell()
    assert parent.expect("published") == {"well": True}
    assert waiting.result(20) == Ready("wait")


def test_a_forked_child_claims_by_itself_and_is_a_process_of_its_own(node: Node) -> None:
    parent = node.rank(FORK % "own = claim(client, 'own'); say('pid', pid=os.getpid()); time.sleep(60)")
    parent.expect("Lead")
    parent.expect("Lead")
    child = parent.expect("pid")["pid"]
    assert child != parent.pid
    assert f"pid {child})" in node.flight("own")["leader"]
    assert f"pid {parent.pid})" in node.flight("k")["leader"]
    os.kill(child, signal.SIGKILL)  # its lead is free; its parent's is not
    until(lambda: not node.flight("own"))
    assert f"pid {parent.pid})" in node.flight("k")["leader"]
    parent.tell()
    parent.tell()
    assert parent.expect("published") == {"well": True}


def test_a_forked_child_may_wait_for_its_parent(node: Node) -> None:
    parent = node.rank(FORK % "claim(client, 'k')")
    parent.expect("Lead")
    node.until_waiting("k", 1)
    assert node.publish(node.client(), None, "k")
    assert parent.expect("Ready") == {"source": "wait"}
    parent.tell()
    parent.tell()
    assert parent.expect("published") == {"well": True}


CLOSES_ALL = """
import os, socket
lead = claim(client, "k")
client.status()  # an idle connection, too
os.closerange(3, 4096)
mine = [end for _ in range(8) for end in socket.socketpair()]  # by the numbers that were ours
well = publish(client, lead, "k")
claim(client, "other")
client.close()
for end in mine:
    end.setblocking(False)
    end.send(b"x")
say("done", published=well, received=[end.recv(100).decode() for end in mine])
"""


def test_a_script_that_closes_all_descriptors_finds_nothing_of_ours_in_those_that_it_opens_then(node: Node) -> None:
    rank = node.rank(CLOSES_ALL, PYTHONWARNINGS="ignore")
    rank.expect("Lead")
    rank.expect("Lead")
    assert rank.expect("done") == {"published": True, "received": ["x"] * 16}


def test_a_forked_child_keeps_no_connection_of_its_parent_open(node: Node) -> None:
    """Neither an idle one, nor one that leads, nor one that another thread waits on."""
    parent = node.rank(
        """
        import os, stat, threading
        lead = claim(client, "k")
        client.status()
        waiter = threading.Thread(target=lambda: claim(client, "k"))
        waiter.start()
        listen()
        if os.fork() == 0:
            sockets = [d for d in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{d}")]
            say("open", sockets=[d for d in sockets if stat.S_ISSOCK(os.stat(int(d)).st_mode)])
            os._exit(0)
        os.wait()
        publish(client, lead, "k")
        waiter.join()
        """,
        PYTHONWARNINGS="ignore",
    )
    parent.expect("Lead")
    node.until_waiting("k", 1)
    parent.tell()
    assert parent.expect("open") == {"sockets": []}
    assert parent.expect("Ready") == {"source": "wait"}


# Agents that come and go.


def test_many_stale_connections_cost_one_new_one_and_no_kernel() -> None:
    with Node() as node:
        agent = node.start()
        client = node.client()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(lambda n: node.publish(client, node.claim(client, f"k{n}"), f"k{n}"), range(THREADS)))
            list(pool.map(lambda n: node.claim(client, f"k{n}"), range(THREADS)))
            assert node.status()["clients"] > 3, "too few connections are idle: the test shows nothing"
            agent.kill()
            agent.wait()
            answers = list(pool.map(lambda n: node.claim(client, f"new{n}"), range(THREADS)))
        assert all(isinstance(a, Lead) for a in answers)
        assert len(node.agent_pids()) == 1
        for number, lead in enumerate(answers):
            assert node.publish(client, lead, f"new{number}")


def test_without_an_agent_every_claim_is_alone_and_one_notice_says_so() -> None:
    with Node(spawn="0") as node:
        notices = Notices()
        client = AgentClient(node.settings, notices)
        assert all(isinstance(node.claim(client, f"k{n}"), Alone) for n in range(20))
        (line,) = notices.since(0)[0]
        assert "KCOORD_SPAWN=0" in line
        assert not client.ask(messages.Deliver([hits()]), messages.Done, start=False)
        assert client.status() is None
        assert node.agent_pids() == []


def test_a_claim_has_one_bound_however_often_its_agent_is_replaced_meanwhile() -> None:
    with Node(spawn="0", max_wait="0.2", agent_timeout="0.5") as node:
        bound = node.settings.longest_wait + node.settings.agent_timeout
        asked: list[float] = []

        def serve(listener: socket.socket) -> None:
            with contextlib.suppress(OSError):
                while True:  # agents that end late in a wait, one after the other
                    connection, _ = listener.accept()
                    with connection:
                        connection.recv(65536)
                        frames.send_frame(connection, frames.encode_frame({"op": "welcome"}))
                        connection.recv(65536)
                        asked.append(time.monotonic())
                        while time.monotonic() < asked[-1] + 0.9 * bound:
                            frames.send_frame(connection, frames.encode_frame({"op": "waiting", "id": 1}))
                            time.sleep(0.05)

        with endpoint.bind(node.path) as listener:
            thread = threading.Thread(target=serve, args=(listener,), daemon=True)
            thread.start()
            answer = node.claim(node.client(), "k")
            ended = time.monotonic()
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        node.path.unlink()
        assert isinstance(answer, Alone)
        assert len(asked) == 2
        assert ended - asked[0] < 1.5 * bound


@pytest.mark.serial
def test_a_dead_agent_costs_its_timeout_once_and_not_for_each_kernel() -> None:
    with Node(agent_timeout="1") as node:
        agent = node.start()
        client = node.client()
        node.status()
        pause(agent)
        start = time.monotonic()
        assert all(isinstance(node.claim(client, f"k{n}"), Alone) for n in range(50))
        assert time.monotonic() - start < 2.5
        agent.send_signal(signal.SIGCONT)


@pytest.mark.serial
def test_an_agent_that_is_back_is_found_however_often_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_client, "_RETRY_AFTER", 0.5)
    with Node(spawn="0") as node:
        client = node.client()
        assert isinstance(node.claim(client, "k"), Alone)
        node.start()
        dead_since = time.monotonic()
        until(
            lambda: client.ask(messages.Deliver([hits()]), messages.Done, start=False), 5
        )  # asks many times in half a second
        assert time.monotonic() - dead_since < 2
        assert isinstance(lead := node.claim(client, "k"), Lead)
        assert node.publish(client, lead, "k")


def test_a_dead_agent_is_not_asked_again_for_a_while() -> None:
    with Node(spawn="0") as node:
        client = node.client()
        assert isinstance(node.claim(client, "k"), Alone)
        node.start()
        answer = node.claim(client, "k")
        assert isinstance(answer, Alone)
        assert "a moment ago" in answer.why


# Requests that cannot be made.


def test_a_claim_that_fits_no_frame_is_alone_and_the_agent_is_not_to_blame(node: Node) -> None:
    client = node.client()
    huge = CacheKey.of("test", "x" * frames.LARGEST_FRAME)
    assert isinstance(client.claim(huge, node.home("huge")), Alone)
    assert isinstance(lead := node.claim(client, "k"), Lead)
    assert node.publish(client, lead, "k")


LARGE = {f"factor {n}": "x" * 150 for n in range(30_000)}


def test_a_key_that_fits_no_frame_is_compiled_alone_and_nobody_waits_for_it(node: Node) -> None:
    client = node.client()
    huge = CacheKey.of("test", "k", many=LARGE)
    for _ in range(2):
        answer = client.claim(huge, node.home("k"))
        assert isinstance(answer, Alone)
        assert "too large to be shared" in answer.why
    assert not client.publish(None, huge, stage(node.home("k")), node.home("k"), 0.5, "")
    assert isinstance(other := node.claim(client, "other"), Lead), "the agent is not to blame"
    assert node.publish(client, other, "other")


def test_an_explanation_that_fits_no_frame_is_left_out_and_who_waits_has_the_kernel(node: Node) -> None:
    client = node.client()
    lead = node.lead(client, "k")
    waiting = node.claiming(node.client(), "k")
    node.until_waiting("k", 1)
    explained = key_of("k").with_details(LARGE)
    assert client.publish(lead, explained, stage(node.home("k")), node.home("k"), 0.5, "")
    assert waiting.result(20) == Ready("wait")
    assert node.read("k") == "a kernel"


def test_a_publish_that_cannot_be_carried_is_no_failed_compile_and_the_next_rank_leads(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = node.client()
    lead = node.lead(client, "k")
    waiting = node.claiming(heir := node.client(), "k")
    node.until_waiting("k", 1)
    monkeypatch.setattr(fields, "LARGEST_KEY", -1)
    assert not node.publish(client, lead, "k")
    leads = waiting.result(20)
    assert isinstance(leads, Lead)
    monkeypatch.undo()
    assert node.publish(heir, leads, "k")


def test_a_name_and_a_path_that_are_no_utf8_are_no_obstacle(node: Node) -> None:
    client = node.client()
    home = node.directory / os.fsdecode(b"caf\xe9") / "home"
    assert isinstance(lead := client.claim(key_of("k"), home), Lead)
    assert client.publish(lead, key_of("k"), stage(home), home, 0.5, "")
    assert (home / "kernel.txt").read_text() == "a kernel"
