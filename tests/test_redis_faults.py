"""Redis is absent, refuses, hangs, is killed or flushed: the job ends as it would without kcoord, and says why, once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from kcoord.artifacts.store import Store
from tests.conftest import PROGRAMS, Sandbox, eventually, finish
from tests.redis_server import RedisServer

KERNELS = 8
_NODES = 2
_RANKS = 2


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as running:
        yield running


class Job:
    """Two nodes of two ranks each, with a store between them; each node's agent is `kcoord exec`'s."""

    def __init__(self, sandbox: Sandbox, url: str, seconds: float = 0.1) -> None:
        self.begun = sandbox.root / "begun"
        self._sandbox = sandbox
        shell = "; ".join(
            f'RANK={r} LOCAL_RANK={r} {sys.executable} {PROGRAMS / "generic_rank.py"} {KERNELS} {seconds} & pids="$pids $!"'
            for r in range(_RANKS)
        )
        script = f"{shell}; for p in $pids; do wait $p || exit 1; done"
        self._nodes: list[subprocess.Popen[str]] = [
            sandbox.start(
                "-c", "from kcoord.cli import main; main()", "exec", "--", "bash", "-c", script,
                KCOORD_LOCAL_DIR=str(sandbox.root / f"node{node}"),
                KCOORD_STORE=str(sandbox.root / "store"),
                KCOORD_REDIS_URL=url,
                KCOORD_LEASE_TTL="2",
                BEGUN=str(self.begun),
            )
            for node in range(_NODES)
        ]  # fmt: skip

    def wait_until_compiling(self) -> None:
        eventually(lambda: self.begun.exists() or any(n.poll() is not None for n in self._nodes), 60)

    def end(self) -> tuple[list[dict[str, Any]], list[str]]:
        """Every rank's report, and each node's lines from kcoord."""
        done = [finish(n) for n in self._nodes]
        assert [d.returncode for d in done] == [0] * _NODES, done[0].stderr
        reports = [json.loads(x) for d in done for x in d.stdout.splitlines() if x.startswith("{")]
        assert len(reports) == _NODES * _RANKS
        assert all(len(r["served"]) == KERNELS for r in reports)
        store = Store(self._sandbox.root / "store")
        assert len(store.manifests()) == KERNELS
        return reports, [d.stderr for d in done]


def compiles(reports: list[dict[str, Any]]) -> int:
    return sum(len(r["compiled"]) for r in reports)


def test_with_redis_two_nodes_compile_each_kernel_once(sandbox: Sandbox, server: RedisServer) -> None:
    reports, errors = Job(sandbox, server.url).end()
    assert compiles(reports) == KERNELS
    assert all("cannot be used" not in e for e in errors)


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "unix:///nowhere/redis.sock"])
def test_a_redis_that_is_not_there_costs_one_warning_per_node(sandbox: Sandbox, url: str) -> None:
    reports, errors = Job(sandbox, url).end()
    assert KERNELS <= compiles(reports) <= _NODES * KERNELS
    assert all(e.count("Redis cannot be used") == 1 for e in errors)


def test_a_wrong_password_costs_one_warning_per_node_and_is_not_printed(sandbox: Sandbox) -> None:
    with RedisServer(tcp=True, password="right") as server:
        reports, errors = Job(sandbox, server.url.replace("right", "wr0ng")).end()
    assert compiles(reports) <= _NODES * KERNELS
    assert all(e.count("Redis cannot be used") == 1 and "wr0ng" not in e for e in errors)


def test_a_redis_that_hangs_in_mid_job_delays_it_by_seconds_only(sandbox: Sandbox, server: RedisServer) -> None:
    job = Job(sandbox, server.url)
    job.wait_until_compiling()
    server.pause()
    try:
        reports, errors = job.end()
    finally:
        server.resume()
    assert compiles(reports) <= _NODES * KERNELS
    assert sum(e.count("Redis cannot be used") for e in errors) <= _NODES


def test_a_redis_that_is_killed_in_mid_job_harms_nothing(sandbox: Sandbox, server: RedisServer) -> None:
    job = Job(sandbox, server.url)
    job.wait_until_compiling()
    server.kill()
    reports, _ = job.end()
    assert compiles(reports) <= _NODES * KERNELS


def test_a_redis_that_is_flushed_in_mid_job_costs_one_compile_at_most(sandbox: Sandbox, server: RedisServer) -> None:
    job = Job(sandbox, server.url)
    job.wait_until_compiling()
    server.command("FLUSHALL")
    reports, _ = job.end()
    assert compiles(reports) <= KERNELS + 1


def test_redis_without_a_store_is_pointed_out(sandbox: Sandbox, server: RedisServer) -> None:
    done = sandbox.run(
        "-c", "from kcoord.cli import main; main()", "exec", "--", "true", KCOORD_REDIS_URL=server.url
    )  # fmt: skip
    assert done.returncode == 0
    assert done.stderr.count("set KCOORD_STORE to a shared directory") == 1
