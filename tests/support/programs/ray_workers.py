"""Starts workers by Ray that compile kernels: ray_workers.py WAY REPORTS EXIT-CODE [ADDRESS | hook].

With ADDRESS the cluster is there. Else it is a cluster of this node alone; with "hook" it knows nothing of kcoord, and the job's
runtime environment does.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray

import worker
from worker import WORKERS


def join(cluster: str) -> None:
    environment: dict[str, Any] = {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}
    if cluster == "hook":
        environment["env_vars"] |= {"KCOORD_IDLE_TIMEOUT": "0.5", "KCOORD_JOB": "of-ray"}
        environment["worker_process_setup_hook"] = "kcoord.install"
    if cluster and cluster != "hook":
        ray.init(cluster, runtime_env=environment)
    else:
        ray.init(num_cpus=WORKERS, include_dashboard=False, object_store_memory=100 << 20, runtime_env=environment)


def tasks(reports: str) -> None:
    remote = ray.remote(worker.work)
    assert ray.get([remote.remote(reports, n) for n in range(WORKERS)]) == list(range(WORKERS))


def actors(reports: str) -> None:
    class Worker:
        def work(self, number: int) -> int:
            return worker.work(reports, number)

    kind = ray.remote(num_cpus=1)(Worker)
    them = [kind.remote() for _ in range(WORKERS)]
    assert ray.get([each.work.remote(n) for n, each in enumerate(them)]) == list(range(WORKERS))


def torch_trainer(reports: str) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    TorchTrainer(
        lambda: worker.work(reports),
        scaling_config=ScalingConfig(num_workers=WORKERS),
        run_config=RunConfig(storage_path=str(Path(reports).parent / "results")),
    ).fit()


WAYS = {each.__name__: each for each in (tasks, actors, torch_trainer)}

if __name__ == "__main__":
    way, reports, code, *cluster = sys.argv[1:]
    join("".join(cluster))
    WAYS[way](reports)
    ray.shutdown()
    sys.exit(int(code))
