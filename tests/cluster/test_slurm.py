"""The recipes for Slurm, run by a real Slurm of two nodes."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.redis_server import RedisServer
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish
from tests.support.slurm_cluster import KILL_WAIT, SlurmCluster, missing, slurm_cluster

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
RANK = PROGRAMS / "generic_rank.py"
KCOORD = Path(sys.executable).with_name("kcoord")
WHO = """
import json, os, sys
from kcoord.protocol.identity import Identity
who = Identity.here(os.environ.get("KCOORD_JOB"))
seen = {"rank": who.rank, "local": who.local_rank, "job": who.job, "socket": os.environ.get("KCOORD_SOCKET"),
        "redis": os.environ.get("KCOORD_REDIS_URL"), "store": os.environ.get("KCOORD_STORE")}
sys.stdout.write(json.dumps(seen) + "\\n")
"""
needs_slurm = pytest.mark.skipif(missing() is not None, reason=f"a real Slurm: {missing()}")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture
def box(sandbox: Sandbox) -> Sandbox:
    """A sandbox whose PATH has the `kcoord` and the `python` of these tests, and a store."""
    if not KCOORD.exists():
        pytest.skip(f"no kcoord beside {sys.executable}: pip install -e .")
    sandbox.environment["PATH"] = os.pathsep.join([str(KCOORD.parent), os.environ["PATH"]])
    sandbox.environment["KCOORD_STORE"] = str(sandbox.root / "store")
    return sandbox


def batch(slurm: SlurmCluster, box: Sandbox, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """``sbatch words``, until the job has ended: its exit code, output and errors."""
    out, err = box.root / "out", box.root / "err"
    command = ["sbatch", "--parsable", f"--output={out}", f"--error={err}", *words]
    environment = {**box.env(**more), **slurm.environment}
    done = subprocess.run(
        command, env=environment, cwd=box.root, capture_output=True, text=True, timeout=60, check=True
    )  # `sbatch --wait` asks every ten seconds
    job = done.stdout.strip()
    eventually(lambda: slurm.state(job) in ("COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL"), 120, f"job {job} ended")
    return subprocess.CompletedProcess(command, slurm.exit_code(job), _text(out), _text(err))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def said(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def summaries(errors: str) -> list[str]:
    return re.findall(r"kcoord: this node: \d+ kernels: (\d+ compiled, \d+ loaded)", errors)


def added_up(lines: list[str]) -> tuple[int, ...]:
    """Compiles and loads of all nodes."""
    return tuple(sum(column) for column in zip(*(map(int, re.findall(r"\d+", line)) for line in lines), strict=True))


@needs_slurm
def test_tasks_of_a_node_share_one_agent_and_nodes_one_compile(slurm: SlurmCluster, box: Sandbox) -> None:
    with RedisServer(tcp=True, password="hunter2") as redis:
        done = batch(
            slurm, box, "--nodes=2", "--ntasks-per-node=3", str(LAUNCH / "slurm" / "per-gpu.sbatch"),
            "python", str(RANK), "4", "0.05", KCOORD_REDIS_URL=redis.url,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = said(done.stdout)
    assert len(ranks) == 6
    assert sorted(n for rank in ranks for n in rank["compiled"]) == [0, 1, 2, 3], "each kernel once, on two nodes"
    assert all(rank["counters"]["alone"] == 0 for rank in ranks)
    lines = summaries(done.stderr)
    assert len(lines) == 2, done.stderr
    assert added_up(lines) == (4, 20), "each node sums up its ranks"
    assert "hunter2" not in done.stdout + done.stderr
    assert not box.processes(), "nothing of the job is left"
    assert not list(box.local.glob("*/*.sock"))


@needs_slurm
def test_the_tasks_know_their_numbers_and_no_password(slurm: SlurmCluster, box: Sandbox) -> None:
    script = box.root / "who.py"
    script.write_text(WHO)
    done = batch(
        slurm, box, "--nodes=2", "--ntasks-per-node=2", str(LAUNCH / "slurm" / "per-gpu.sbatch"), "python", str(script),
        KCOORD_REDIS_URL="redis://:hunter2@127.0.0.1:1/0",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = sorted(said(done.stdout), key=lambda seen: seen["rank"])
    assert [(seen["rank"], seen["local"]) for seen in ranks] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert {seen["redis"] for seen in ranks} == {None}
    assert len({seen["job"] for seen in ranks}) == 1
    assert len({seen["socket"] for seen in ranks}) == 2, "an agent for each node"


@needs_slurm
def test_a_heterogeneous_step_has_one_world_and_one_job(slurm: SlurmCluster, box: Sandbox) -> None:
    command = ["srun", "-N1", "-n2", "kcoord", "exec", "--", "python", "-c", WHO]
    command += [":", "-N1", "-n1", "kcoord", "exec", "--", "python", "-c", WHO]
    done = subprocess.run(
        command, env={**box.env(), **slurm.environment}, cwd=box.root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    ranks = said(done.stdout)
    assert sorted((seen["rank"], seen["local"]) for seen in ranks) == [(0, 0), (1, 1), (2, 0)]
    assert len({seen["job"] for seen in ranks}) == 1


@needs_slurm
def test_one_torchrun_for_each_node_without_redis(slurm: SlurmCluster, box: Sandbox) -> None:
    pytest.importorskip("torch")
    done = batch(
        slurm, box, "--nodes=2", str(LAUNCH / "slurm" / "torchrun.sbatch"), str(RANK), "3", "0.05",
        PROCS_PER_NODE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=_free_port(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ranks = said(done.stdout)
    assert len(ranks) == 4
    assert sorted(n for rank in ranks for n in rank["compiled"]) == [0, 1, 2], done.stderr  # lease files elect one
    assert len(summaries(done.stderr)) == 2
    assert not box.processes()


@needs_slurm
def test_a_failing_rank_ends_the_job(slurm: SlurmCluster, box: Sandbox) -> None:
    done = batch(
        slurm, box, "--nodes=2", "--ntasks-per-node=2", str(LAUNCH / "slurm" / "per-gpu.sbatch"),
        "bash", "-c", 'if [ "$RANK" = 0 ]; then exit 7; fi; sleep 600',
    )  # fmt: skip
    assert done.returncode != 0, "srun's own is the highest of all tasks', those included that it ended"
    assert "task 0: Exited with exit code 7" in done.stderr
    eventually(lambda: not box.processes())


@needs_slurm
def test_scancel_leaves_nothing_and_the_next_job_compiles_at_once(slurm: SlurmCluster, box: Sandbox) -> None:
    settings = {"KCOORD_LEASE_TTL": "600"}
    recipe, command = str(LAUNCH / "slurm" / "per-gpu.sbatch"), ["python", str(RANK), "1"]
    begun = box.root / "begun"
    submitted = subprocess.run(
        ["sbatch", "--parsable", "--output=/dev/null", "--nodes=2", "--ntasks-per-node=2", recipe, *command, "600"],
        env={**box.env(BEGUN=str(begun), **settings), **slurm.environment},
        cwd=box.root, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    eventually(begun.exists, 60, "a rank compiles")
    cancelled = time.monotonic()
    slurm.command("scancel", submitted.stdout.strip())
    eventually(lambda: not box.processes(), KILL_WAIT + 20)
    # the leader's lease was given back: without that, its TTL of 600 s would have to pass
    done = batch(slurm, box, "--nodes=1", "--ntasks-per-node=1", recipe, *command, "0.05", **settings)
    assert done.returncode == 0, done.stderr
    assert [rank["compiled"] for rank in said(done.stdout)] == [[0]]
    assert said(done.stdout)[0]["counters"]["alone"] == 0
    assert time.monotonic() - cancelled < 300


@needs_slurm
def test_a_step_hears_of_a_signal_once_and_its_agent_goes_on(slurm: SlurmCluster, box: Sandbox) -> None:
    """As a job is told that its time is nearly over, and ``sbatch --signal=USR1@60`` asks for it."""
    begun, out = box.root / "begun", box.root / "out"
    hears = (
        "import signal, sys; numbers = signal.SIGUSR1, signal.SIGTERM; signal.pthread_sigmask(signal.SIG_BLOCK, numbers)\n"
        "open(sys.argv[1], 'w').close()\n"
        "while True: print('heard', signal.Signals(signal.sigwait(numbers)).name, flush=True)\n"
    )
    submitted = subprocess.run(
        ["sbatch", "--parsable", f"--output={out}", "--ntasks-per-node=1", str(LAUNCH / "slurm" / "per-gpu.sbatch"),
         "bash", "-c", 'until kcoord status; do sleep 0.1; done > /dev/null 2>&1; exec "$@"', "",
         "python", "-c", hears, str(begun)],
        env={**box.env(), **slurm.environment}, cwd=box.root, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    job = submitted.stdout.strip()
    eventually(begun.exists, 60, "the agent answers, and the script listens")
    slurm.command("scancel", "--signal=USR1", job)
    eventually(lambda: "heard SIGUSR1" in out.read_text(), 60)
    slurm.command("scancel", job)
    eventually(lambda: "heard SIGTERM" in out.read_text(), 60)
    eventually(lambda: not box.processes(), KILL_WAIT + 20)
    assert re.findall("heard (.*)", out.read_text()) == ["SIGUSR1", "SIGTERM"]
    assert "restarted" not in out.read_text().partition("heard SIGTERM")[0]


@needs_slurm
def test_a_requeued_job_compiles_only_what_is_left_and_has_its_old_name(slurm: SlurmCluster, box: Sandbox) -> None:
    begun, out = box.root / "begun", box.root / "out"
    hangs = f"python {RANK} 2; BEGUN={begun} exec python {RANK} 3 600"
    command = (
        f'echo "run ${{SLURM_RESTART_COUNT:-0}} of $KCOORD_JOB"; [ -n "${{SLURM_RESTART_COUNT:-}}" ] || {{ {hangs}; }}'
    )
    submitted = subprocess.run(
        ["sbatch", "--parsable", "--open-mode=append", f"--output={out}", "--ntasks-per-node=1",
         str(LAUNCH / "slurm" / "per-gpu.sbatch"), "bash", "-c", f"{command}; exec python {RANK} 3"],
        env={**box.env(), **slurm.environment}, cwd=box.root, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    job = submitted.stdout.strip()
    eventually(begun.exists, 60, "the third kernel is being compiled")
    slurm.command("scontrol", "requeue", job)
    eventually(lambda: slurm.state(job) == "PENDING" and not box.processes(), KILL_WAIT + 20)
    slurm.command("scontrol", "update", f"JobId={job}", "StartTime=now")  # Slurm would let it wait for minutes
    eventually(lambda: slurm.state(job) == "COMPLETED", 60)
    assert [rank["compiled"] for rank in said(out.read_text())] == [[0, 1], [2]]
    assert re.findall(r"run .*", out.read_text()) == [f"run 0 of {job}", f"run 1 of {job}"]


def test_the_epilog_ends_agents_of_its_job_alone(box: Sandbox) -> None:
    epilog = str(LAUNCH / "slurm" / "epilog.sh")
    with agent_of("41", box) as ours, agent_of("42", box) as other:
        for job in ("", "4", "42; rm -rf x", "41"):
            done = subprocess.run([epilog], env={**os.environ, "SLURM_JOB_ID": job}, timeout=30)
            assert done.returncode == 0
        assert finish(ours).returncode == 0, "it was told to end, and drained"
        assert other.poll() is None
        other.terminate()
        assert finish(other).returncode == 0


@contextmanager
def agent_of(job: str, box: Sandbox) -> Iterator[subprocess.Popen[str]]:
    """An agent that listens. It, and with it its pipes, has ended when the block has, also if the block fails."""
    path = box.root / f"agent-{job}.sock"
    with box.start(KCOORD, "agent", "--socket", path, SLURM_JOB_ID=job) as process:
        try:
            eventually(lambda: path.exists() or process.poll() is not None)
            assert process.poll() is None, finish(process)
            eventually(lambda: box.run(KCOORD, "status", "--socket", path).returncode == 0)
            yield process
        finally:
            process.kill()


def test_the_scripts_are_bash() -> None:
    scripts = list(LAUNCH.glob("slurm/*.s*"))
    assert len(scripts) == 3
    for script in scripts:
        subprocess.run(["bash", "-n", str(script)], check=True, timeout=10)
        assert script.suffix == ".sbatch" or os.access(script, os.X_OK), script


@pytest.mark.parametrize("recipe", ["per-gpu", "torchrun"])
def test_a_job_of_very_many_nodes_meets_at_the_first_of_them(sandbox: Sandbox, recipe: str) -> None:
    """Their list is longer than what a program writes in one piece: who takes the first line only may end its writer."""
    programs = sandbox.root / "bin"
    programs.mkdir()
    for name, says in (("scontrol", "seq -f node%06.0f 1 20000"), ("srun", 'echo "$MASTER_ADDR $*"')):
        (programs / name).write_text(f"#!/bin/sh\n{says}\n")
        (programs / name).chmod(0o755)
    given = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "node[1-20000]", "SLURM_JOB_NUM_NODES": "20000",
             "SLURM_CPUS_ON_NODE": "1", "KCOORD_STORE": str(sandbox.root / "store")}  # fmt: skip
    environment = sandbox.env(PATH=os.pathsep.join([str(programs), os.environ["PATH"]]), **given)
    command = ["bash", str(LAUNCH / "slurm" / f"{recipe}.sbatch"), "train.py"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "node000001" in done.stdout
    assert "node000002" not in done.stdout


def test_a_recipe_without_a_store_says_what_is_missing(sandbox: Sandbox) -> None:
    recipes = list(LAUNCH.glob("slurm/*.sbatch"))
    assert recipes
    for recipe in recipes:
        environment = sandbox.env(SLURM_JOB_ID="1")
        done = subprocess.run(["bash", str(recipe)], env=environment, capture_output=True, text=True, timeout=10)
        assert done.returncode != 0
        assert "KCOORD_STORE: name a directory that all nodes share" in done.stderr


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
