"""Ray: a cluster of one job, one that many jobs use, and Ray Train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.sandbox import Sandbox, eventually, finish
from tests.support.workers import EXEC, below_exec, check, of_job

pytest.importorskip("ray", reason="make test-platforms installs Ray")
pytest.importorskip("torch")

QUIET = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
START = (
    sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port=0", "--num-cpus=2",
    "--include-dashboard=false", "--object-store-memory=100000000",
)  # fmt: skip


@pytest.mark.parametrize("way", ["tasks", "actors", "torch_trainer"])
def test_workers_of_a_cluster_that_the_job_starts(sandbox: Sandbox, way: str) -> None:
    check(sandbox, below_exec(sandbox, "ray_workers.py", way, **QUIET))


def test_workers_that_only_the_runtime_environment_hooks(sandbox: Sandbox) -> None:
    """The first one starts the agent, which ends when it has been idle."""
    done = sandbox.run(*of_job(sandbox, "ray_workers.py", "actors", "hook")[1:], **QUIET, KCOORD_PROFILE=None)
    check(sandbox, done, summary=False)
    assert not list(sandbox.local.glob("profiles/*")), "Ray's worker program is not the job's"


def test_workers_of_a_cluster_that_is_started_below_kcoord(sandbox: Sandbox) -> None:
    """The cluster has the agent, and a job that knows nothing of kcoord ends before it."""
    cluster = sandbox.start(*EXEC, *START, **QUIET)
    address = Path(sandbox.environment["TMPDIR"]) / "ray" / "ray_current_cluster"
    eventually(lambda: address.exists() or cluster.poll() is not None, 60)
    job = of_job(sandbox, "ray_workers.py", "actors", address.read_text().strip())
    done = sandbox.run(*job[1:], **QUIET)
    assert cluster.poll() is None
    cluster.terminate()
    ended = finish(cluster)
    assert "3 kernels: 3 compiled, 3 loaded" in ended.stderr
    check(sandbox, done, summary=False)
