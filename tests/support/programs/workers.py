"""Starts workers that compile kernels as libraries start theirs: workers.py WAY REPORTS EXIT-CODE.

`vllm` and `sglang` play the way in which these start and end their processes; the packages themselves need a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path

import worker
from worker import WORKERS


def forkserver_pool(reports: str) -> None:
    """The server has imported Triton, and all that its import hooks, before it forks a worker."""
    multiprocessing.set_forkserver_preload(["triton"])
    with multiprocessing.get_context("forkserver").Pool(WORKERS) as pool:  # it ends its workers by SIGTERM
        assert pool.starmap(worker.work, [(reports, n) for n in range(WORKERS)], 1) == list(range(WORKERS))


def vllm(reports: str) -> None:
    """A process for the engine starts one for each GPU, by the method that a variable names, and ends them by SIGTERM."""
    engine = multiprocessing.get_context("spawn").Process(target=vllm_engine, args=(reports,), name="EngineCore")
    engine.start()
    engine.join()
    assert engine.exitcode == 0


def vllm_engine(reports: str) -> None:
    import triton  # noqa: F401  # forked workers have it from here

    context = multiprocessing.get_context(os.environ.get("VLLM_WORKER_MULTIPROC_METHOD", "fork"))
    started = []
    for _ in range(WORKERS):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=vllm_worker, args=(reports, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    for _, ready in started:
        assert ready.recv() == "READY"
    for process, _ in started:
        process.terminate()
    for process, _ in started:
        process.join()


def vllm_worker(reports: str, ready: Connection) -> None:
    os.environ["TRITON_CACHE_DIR"] = str(Path(reports) / "vllm" / "triton_cache")  # as it does for torch.compile
    Path(os.environ["TRITON_CACHE_DIR"]).mkdir(parents=True, exist_ok=True)
    worker.work(reports)
    ready.send("READY")
    signal.pause()


def sglang(reports: str) -> None:
    """A scheduler for each GPU dies with its parent, which ends by killing every process below it."""
    multiprocessing.set_start_method("spawn")
    started = []
    for _ in range(WORKERS):
        ours, theirs = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.Process(target=sglang_scheduler, args=(reports, theirs))
        process.start()
        started.append(ours)
    for ready in started:
        assert ready.recv() == "ready"
    kill_below()


def sglang_scheduler(reports: str, ready: Connection) -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    worker.work(reports)
    ready.send("ready")
    signal.pause()


def kill_below() -> None:
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


WAYS = {each.__name__: each for each in (forkserver_pool, vllm, sglang)}

if __name__ == "__main__":
    way, reports, code = sys.argv[1:]
    WAYS[way](reports)
    sys.exit(int(code))
