"""A real agent, real ranks, and what happens when one of them dies, hangs, fails or lies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import wait

import psutil
import pytest

from kcoord.agent.server import Agent
from kcoord.artifacts import local
from kcoord.artifacts.store import Store
from kcoord.leases.base import Lease
from kcoord.leases.local import LocalLeases
from kcoord.packs.recipe_files import paths_of_parts
from kcoord.protocol import endpoint, messages
from kcoord.rank.client import BUSY, AgentClient, Alone, Failed, Lead, Ready
from kcoord.telemetry.events import Notices
from kcoord.telemetry.spans import Span
from tests.support.agents import SOON, Node, Rank, hits, in_thread, key_of, recipe_of, stage, until, watching
from tests.support.cluster import start_agent
from tests.support.ports import reserve_port

LEADER = """
lead = claim(client, "k")
listen()
publish(client, lead, "k")
say("done")
"""
WAITER = """
answer = claim(client, "k")
listen()
if isinstance(answer, Lead):
    publish(client, answer, "k")
say("done")
"""


@pytest.fixture
def node() -> Iterator[Node]:
    with Node() as node:
        node.start()
        yield node


def leader_and_waiter(node: Node, leader: str = LEADER) -> tuple[Rank, Rank]:
    first = node.rank(leader)
    first.expect("Lead")
    second = node.rank(WAITER)
    node.until_waiting("k", 1)
    return first, second


# The way of a claim.


@pytest.mark.smoke
def test_one_leads_and_the_others_wait_until_it_is_ready(node: Node) -> None:
    leader = node.rank(LEADER)
    leader.expect("Lead")
    waiters = [node.rank(WAITER) for _ in range(3)]
    node.until_waiting("k", 3)
    assert node.flight("k")["state"] == "compiling"
    leader.tell()
    for waiter in waiters:
        assert waiter.expect("Ready") == {"source": "wait"}
    leader.expect("done")
    assert node.read("k") == "a kernel"
    assert node.status()["flights"] == []


def test_each_waiter_gets_a_copy_where_it_wants_it(node: Node) -> None:
    client = node.client()
    lead = node.claim(client, "k", "one")
    others = [node.claiming(node.client(), "k", tier) for tier in ("one", "two", "three")]
    node.until_waiting("k", 3)
    assert node.publish(client, lead, "k", "one")
    assert [other.result(20) for other in others] == [Ready("wait")] * 3
    assert [node.read("k", tier) for tier in ("one", "two", "three")] == ["a kernel"] * 3


def test_a_waiter_whose_home_cannot_be_written_goes_on_alone(node: Node) -> None:
    (node.directory / "file").write_text("no directory")
    client = node.client()
    lead = node.claim(client, "k")
    other = node.claiming(node.client(), "k", "file")
    node.until_waiting("k", 1)
    assert node.publish(client, lead, "k")
    assert isinstance(other.result(20), Alone)


def test_an_artifact_that_was_compiled_without_a_lead_is_for_all_who_wait(node: Node) -> None:
    client, stranger = node.client(), node.client()
    lead = node.claim(client, "k")
    waiter = node.claiming(node.client(), "k")
    node.until_waiting("k", 1)
    assert node.publish(stranger, None, "k")
    assert waiter.result(20) == Ready("wait")
    assert node.publish(client, lead, "k"), "the leader's own publish is harmless"


# Claims that do not wait.


def test_a_claim_that_does_not_wait_is_busy_while_another_rank_compiles(node: Node) -> None:
    leader, waiter = leader_and_waiter(node)
    hurried, home = node.client(), node.home("k")
    assert hurried.claim(key_of("k"), home, wait=False) is BUSY
    assert isinstance(lead := hurried.claim(key_of("other"), node.home("other"), wait=False), Lead), (
        "it is free for more"
    )
    assert node.publish(hurried, lead, "other")
    leader.kill()
    waiter.expect("Lead")
    assert hurried.claim(key_of("k"), home, wait=False) is BUSY
    waiter.tell()
    waiter.expect("done")
    # its lease is given back a moment later
    until(lambda: isinstance(hurried.claim(key_of("k"), home, wait=False), Ready))


def test_of_many_that_do_not_wait_one_leads_and_it_is_waited_for(node: Node) -> None:
    clients = [node.client() for _ in range(8)]
    claims = [in_thread(lambda c=c: c.claim(key_of("k"), node.home("k"), wait=False)) for c in clients]
    answers = [c.result(20) for c in claims]
    assert sorted(type(a).__name__ for a in answers) == ["Busy"] * 7 + ["Lead"]
    waiting = node.claiming(node.client(), "k")
    node.until_waiting("k", 1)
    ((client, lead),) = [(c, a) for c, a in zip(clients, answers, strict=True) if isinstance(a, Lead)]
    assert node.publish(client, lead, "k")
    assert waiting.result(20) == Ready("wait")


# Leaders that do not make it.


def test_the_next_rank_leads_when_the_leader_forgets_its_lead_and_lives_on(node: Node) -> None:
    """How one dies: `tests/faults/test_ranks.py`."""
    forgets = (
        "import warnings\nlead = claim(client, 'k')\nlisten()\nwarnings.simplefilter('ignore')\ndel lead\nlisten()\n"
    )
    leader, waiter = leader_and_waiter(node, forgets)
    leader.tell()
    waiter.expect("Lead")


def test_a_failure_is_told_to_all_at_once(node: Node) -> None:
    client = node.client()
    lead = node.lead(client, "k")
    others = [node.claiming(node.client(), "k") for _ in range(4)]
    node.until_waiting("k", 4)
    client.fail(lead, key_of("k"), "out of registers")
    answers = [other.result(20) for other in others]
    assert all(isinstance(a, Failed) and a.log == "out of registers" and str(os.getpid()) in a.where for a in answers)
    assert isinstance(node.claim(client, "k"), Failed), "and is remembered for a while"


def test_a_long_log_with_odd_bytes_arrives_as_its_end(node: Node) -> None:
    client = node.client()
    lead = node.lead(client, "k")
    client.fail(lead, key_of("k"), "x" * (8 << 20) + "\udcff the end")
    answer = node.claim(client, "k")
    assert isinstance(answer, Failed)
    assert answer.log.endswith("? the end")
    assert len(answer.log) < 1 << 20


def test_those_who_wait_for_a_leader_that_cannot_share_its_files_compile_at_once(node: Node) -> None:
    client = node.client()
    lead = node.lead(client, "k")
    waiting = [node.claiming(node.client(), "k") for _ in range(2)]
    node.until_waiting("k", 2)
    client.give_up(lead, key_of("k"), "an input was written meanwhile")
    for answer in (each.result(20) for each in waiting):
        assert isinstance(answer, Alone)
        assert "an input was written meanwhile" in answer.why
    assert node.status()["flights"] == []


def test_a_publish_that_is_refused_frees_the_waiters_and_leaves_the_files(node: Node) -> None:
    (node.directory / "file").write_text("no directory")
    client = node.client()
    lead = node.lead(client, "k", "file")
    waiting = node.claiming(node.client(), "k", "file")
    node.until_waiting("k", 1)
    staging = stage(node.home("k"))
    assert not client.publish(lead, key_of("k"), staging, node.home("k", "file"), 0.5, "")
    assert isinstance(waiting.result(20), Alone), "the kernel compiles, only this disk is no good"
    assert (staging / "kernel.txt").read_text() == "a kernel"
    assert node.status()["flights"] == []


def test_a_publish_of_nothing_is_refused(node: Node) -> None:
    client = node.client()
    lead = node.lead(client, "k")
    empty = local.new_staging(node.home("k"))
    assert not client.publish(lead, key_of("k"), empty, node.home("k"), 0.5, "")
    assert any("wrote no file" in line for line in node.status()["notices"])


def test_a_publish_that_goes_wrong_in_an_unforeseen_way_keeps_nobody_waiting(node: Node) -> None:
    client = node.client()
    lead = node.lead(client, "k")
    waiting = node.claiming(node.client(), "k")
    node.until_waiting("k", 1)
    staging = stage(node.home("k"))
    (staging / os.fsdecode(b"name\xff")).write_text("a name that is no UTF-8")
    client.publish(lead, key_of("k"), staging, node.home("k"), 0.5, "")
    answer = waiting.result(20)
    assert isinstance(answer, Alone)
    assert "could not publish it" in answer.why
    assert node.status()["flights"] == []


def test_a_child_cannot_claim_for_a_parent_that_has_ended(node: Node) -> None:
    """A lead that nobody watches would block its key for fifteen minutes."""
    parent = node.rank(
        """
        import ctypes
        from tests.support.agents import Wire
        wire = Wire(Settings.from_environ().socket_path)
        wire.hello()
        child = ctypes.PyDLL(None).fork()
        if child:
            say("forked", child=child)
            listen()
            sys.exit()
        listen()
        request = {"op": "claim", "digest": key_of("k").digest, "backend": "b", "name": "n", "home": str(home_of("k"))}
        say("answered", op=wire.ask(request)["op"])
        """.replace("import ctypes", "import ctypes, sys")
    )
    child = parent.expect("forked")["child"]
    with watching(child) as ended:
        parent.kill()
        until(lambda: node.status()["clients"] == 1)
        parent.tell()
        assert parent.expect("answered") == {"op": "refused"}
        assert ended(20)


# Agents that do not make it.


def test_a_killed_agent_is_replaced_and_takes_the_leader_s_work() -> None:
    with Node() as node:
        agent = node.start()
        leader = node.rank(LEADER)
        leader.expect("Lead")
        clients = [node.client() for _ in range(3)]
        waiting = {client: node.claiming(client, "k") for client in clients}
        node.until_waiting("k", 3)
        agent.kill()
        agent.wait()
        first = next(iter(wait(waiting.values(), 20, "FIRST_COMPLETED").done)).result()
        assert isinstance(first, Lead), "of those that asked the new agent, one leads"
        node.until_waiting("k", 2)
        leader.tell()
        leader.expect("done")
        answers = {client: future.result(20) for client, future in waiting.items()}
        assert sorted(type(a).__name__ for a in answers.values()) == ["Lead", "Ready", "Ready"]
        for client, answer in answers.items():
            if isinstance(answer, Lead):
                assert node.publish(client, answer, "k")
        assert node.read("k") == "a kernel"
        assert len(node.agent_pids()) == 1


def test_without_a_successor_those_who_wait_go_on_alone() -> None:
    with Node(spawn="0", agent_timeout="1") as node:
        agent = node.start()
        client = node.client()
        lead = node.lead(client, "k")
        waiting = [node.claiming(node.client(), "k") for _ in range(3)]
        node.until_waiting("k", 3)
        agent.kill()
        agent.wait()
        assert all(isinstance(w.result(5), Alone) for w in waiting)
        assert not node.publish(client, lead, "k")


@pytest.mark.serial
def test_a_short_agent_timeout_does_not_shorten_a_wait() -> None:
    with Node(agent_timeout="0.6") as node:
        node.start()
        client = node.client()
        lead = node.claim(client, "k")
        waiting = node.claiming(node.client(), "k")
        node.until_waiting("k", 1)
        assert not wait([waiting], 1.6).done
        assert node.publish(client, lead, "k")
        assert waiting.result(20) == Ready("wait")


def test_a_redis_that_does_not_answer_delays_no_heartbeat() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent, tempfile.TemporaryDirectory() as store:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        with Node(agent_timeout="1.5", redis_url=url, store=store) as node:
            node.start(prelude="import kcoord.leases.redis as redis; redis.SILENCE = 3.0\n")
            client = node.client()
            silent.settimeout(20)
            other = node.client()
            first = node.claiming(other, "first")
            asked, _ = silent.accept()  # the agent asks Redis for a lease now, and waits
            assert isinstance(lead := node.claim(client, "k"), Lead), "heartbeats came until the breaker opened"
            assert node.publish(client, lead, "k")
            assert node.publish(other, first.result(20), "first")
            asked.close()


# What people ask.


def test_status_tells_who_compiles_what_and_who_waits(node: Node) -> None:
    leader = node.rank(LEADER, RANK="3")
    leader.expect("Lead")
    waiter = node.rank(WAITER, RANK="5")
    node.until_waiting("k", 1)
    status = node.status()
    (flight,) = status["flights"]
    assert (flight["name"], flight["state"], flight["key"]) == ("test:k", "compiling", key_of("k").digest)
    assert f"rank 3, pid {leader.pid}" in flight["leader"]
    assert [f"rank 5, pid {waiter.pid}" in w for w in flight["waiting"]] == [True]
    assert status["pid"] == node.agent_pids()[0]
    assert status["clients"] == 3
    assert status["coordinates"] == "this node"
    assert status["settings"]["local_dir"] == str(node.directory)
    leader.tell()
    waiter.expect("Ready")


def test_stats_add_up_what_ranks_report(node: Node) -> None:
    took = Span("compile", "ok", "test", "k", "ab" * 8, 1e9, 0.5).to_wire()
    for job in ("one", "one", "two"):
        assert node.client(job=job).ask(messages.Deliver([hits(2), took, "nonsense"], 3), messages.Done, start=False)
    reply = node.client().stats("one")
    assert reply is not None
    assert reply["job"] == "one"
    found = reply["figures"]
    assert (found["requests"], found["memory_hits"], found["compiles"], found["compile_seconds"]) == (6, 4, 2, 1.0)
    assert (found["kernels"], found["dropped"]) == (1, 8)
    latest = node.client().stats()
    assert latest is not None
    assert (latest["job"], latest["figures"]["requests"]) == ("two", 3)
    unknown = node.client().stats("three")
    assert unknown is not None
    assert (unknown["job"], unknown["figures"]["requests"]) == (None, 0)


NOTICES = """
client.publish(None, key_of("k"), local.new_staging(home_of("k")), home_of("k"), 0.5, "")
client.status()
say("notices", lines=notices.since(0)[0])
"""


def test_what_ranks_recorded_is_on_disk_as_soon_as_the_last_one_has_left() -> None:
    with Node(agent_timeout="3000") as node:
        node.start(prelude="import kcoord.agent.server as server; server.HEARTBEAT = 1000.0\n")  # no pulse, no chore
        first, last = AgentClient(node.settings, Notices()), AgentClient(node.settings, Notices())
        for client in (first, last):
            assert client.ask(messages.Record("job", [recipe_of("a").to_wire()]), messages.Done, start=False)
        profile = node.directory / "profiles" / "job"
        first.close()
        assert not profile.exists()
        last.close()
        until(lambda: paths_of_parts(profile))


def test_a_notice_reaches_the_ranks_that_are_first_on_their_node() -> None:
    with Node() as node:  # the agent is a daemon, whose own log nobody looks at
        (line,) = node.rank(NOTICES, RANK="0", LOCAL_RANK="0").expect("notices")["lines"]
        assert "not published" in line
        assert node.rank(NOTICES, RANK="1", LOCAL_RANK="1").expect("notices")["lines"] == []
        assert node.status()["notices"] == [line]
        status = node.client().status()
        assert status is not None
        assert status["notices"] == [line], "what people ask for is not mixed up with what they are told unasked"


def test_a_supervised_agent_tells_its_supervisor_s_log_alone(node: Node) -> None:
    assert node.rank(NOTICES, RANK="0", LOCAL_RANK="0").expect("notices")["lines"] == []
    assert len(node.status()["notices"]) == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user for a moment")
def test_another_user_is_refused(node: Node) -> None:
    node.directory.chmod(0o755)
    node.path.chmod(0o666)
    stranger = node.rank(
        """
        import os
        from tests.support.agents import Wire
        path = Settings.from_environ().socket_path
        os.setuid(65534)
        client.close()
        try:
            with Wire(path) as wire:
                pass
        except PermissionError as error:
            say("the client refuses", why=str(error))
        import socket
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(str(path))
        with raw:
            wire = Wire.__new__(Wire)
            wire.socket = raw
            say("the agent answers", **wire.hello())
        """
    )
    assert "user 0" in stranger.expect("the client refuses")["why"]
    answer = stranger.expect("the agent answers")
    assert answer["op"] == "refused"
    assert "user 65534" in answer["why"]
    assert node.status()["clients"] == 1


def test_an_agent_is_small() -> None:
    with Node(redis_url=f"redis://127.0.0.1:{reserve_port()}/0") as node:
        store = node.directory / "store"
        node.settings = node.with_flags(store=str(store))  # the socket's default name depends on it
        agent = node.start()
        with node.wire() as wire:
            wire.hello()
            claim = {"op": "claim", "digest": key_of("k").digest, "backend": "b", "name": "n"}
            assert wire.ask({**claim, "home": str(node.home("k"))})["op"] == "lead"
        assert node.status()["coordinates"] == "lease files", "Redis was not tried: the test shows nothing"
        assert "redis" in node.status()["notices"][0].lower()
        process = psutil.Process(agent.pid)
        assert process.memory_info().rss < 60e6
        maps = {m.path for m in process.memory_maps()}
        assert not any("/site-packages/torch/" in m or "/site-packages/triton/" in m for m in maps)


# The agent's end.


def test_an_idle_daemon_ends_and_removes_its_socket() -> None:
    with Node(idle_timeout="0.5") as node:
        client = node.client()
        lead = node.lead(client, "k")
        (pid,) = node.agent_pids()
        with watching(pid) as ended:
            assert not ended(1), "it ended while a rank was connected"
            client.give_up(lead, key_of("k"))
            client.close()
            assert ended(20)
        assert not node.path.exists()


def test_a_supervised_agent_does_not_end_when_it_is_idle() -> None:
    with Node(idle_timeout="0.2") as node:
        agent = node.start()
        assert node.status()["clients"] == 1
        with watching(agent.pid) as ended:
            assert not ended(1)


def test_an_agent_ends_with_its_parent() -> None:
    with Node() as node:
        parent = node.rank("say('here'); listen()")
        parent.expect("here")
        agent = node.start("--parent", str(parent.pid))
        node.status()
        parent.kill()
        assert agent.wait(20) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_an_agent_that_is_told_to_stop_lets_everybody_go(number: signal.Signals) -> None:
    with Node(spawn="0", agent_timeout="1") as node:
        agent = node.start()
        client = node.client()
        lead = node.lead(client, "k")
        waiting = node.claiming(node.client(), "k")
        node.until_waiting("k", 1)
        agent.send_signal(number)
        assert agent.wait(20) == 0
        assert isinstance(waiting.result(20), Alone)
        client.give_up(lead, key_of("k"))
        lead.connection.close()


def test_an_agent_under_nohup_outlives_its_terminal() -> None:
    with Node() as node:
        agent = start_agent(node, "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n")
        node.status()
        agent.send_signal(signal.SIGHUP)
        assert node.status()["pid"] == agent.pid
        assert agent.poll() is None


async def served(node: Node, leases: LocalLeases, store: Store | None = None) -> tuple[Agent, asyncio.Task[None]]:
    """An agent in this process, so that its lease service can be looked at when it has gone."""
    agent = Agent(node.settings, leases, store, Notices())
    return agent, asyncio.create_task(agent.serve(endpoint.bind(node.path)))


def test_a_lease_ends_although_its_artifact_cannot_be_announced_for_a_reason_nobody_foresaw() -> None:
    class BrokenStore(Store):
        def fetch(self, digest: str, announced: str | None = None) -> None:
            return None

        def publish(self, manifest: object, contents: object) -> str:
            raise ZeroDivisionError

    async def scenario(node: Node) -> None:
        leases = LocalLeases(0.3, 60, 60)
        store = BrokenStore(node.directory / "store")
        store.open()
        agent, serving = await served(node, leases, store)
        client = node.client()
        lead = await asyncio.to_thread(node.claim, client, "k")
        assert await asyncio.to_thread(node.publish, client, lead, "k")
        start = time.monotonic()
        while not isinstance(await leases.acquire(key_of("k").digest, "other", "another node"), Lease):
            assert time.monotonic() < start + SOON, "it is renewed for ever"
            await asyncio.sleep(0.01)
        while not any(
            "ZeroDivisionError" in n for n in agent.status()["notices"]
        ):  # on a busy machine the lease expires before
            assert time.monotonic() < start + SOON, "nothing is told"
            await asyncio.sleep(0.01)
        agent.stop()
        await asyncio.wait_for(serving, 20)

    with Node(spawn="0", lease_ttl="0.3") as node:
        asyncio.run(scenario(node))


def test_a_setting_that_cannot_be_used_is_exit_code_2() -> None:
    with Node() as node, endpoint.bind(node.path) as listener:
        fd = listener.fileno()
        agent = subprocess.run(
            [sys.executable, "-m", "kcoord.agent", "--fd", str(fd)], pass_fds=[fd],
            env=node.environ(KCOORD_LEASE_TTL="soon"), capture_output=True, text=True, timeout=20, check=False,
        )  # fmt: skip
        assert agent.returncode == 2
        assert "KCOORD_LEASE_TTL" in agent.stderr


def test_an_agent_whose_pulse_fails_ends_so_that_the_next_one_is_started() -> None:
    async def scenario(node: Node) -> None:
        agent, serving = await served(node, LocalLeases(60, 60, 60))

        def broken() -> None:
            raise ZeroDivisionError

        agent._services.pools.tick = broken  # type: ignore[method-assign]
        await asyncio.wait_for(serving, 20)
        assert any("ZeroDivisionError" in n for n in agent.status()["notices"])

    with Node(spawn="0") as node:
        asyncio.run(scenario(node))
