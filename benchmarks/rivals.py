"""Caches that users would otherwise use, with Liger-Kernel's real kernels on real GPUs, in one run."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from benchmarks.gpu_plans import COLUMNS, OURS, SHARED, STOCK, Plan, gpus, measure
from benchmarks.result import Result
from tests.support.redis_server import RedisServer

_JOB = Path(__file__).with_name("liger_job.py")
_PRIVATE = {"PRIVATE": "1"}


def run(ranks: int = 0) -> Result:
    """Needs GPUs, Liger-Kernel, PyTorch and a redis-server. `ranks`: 0 is one a GPU."""
    ranks = gpus("rivals", ranks)
    result = Result(f"Caches for 80 Liger-Kernel operations (123 kernels) on {ranks} ranks", COLUMNS)
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kcb-", ignore_cleanup_errors=True)))
        redis = stack.enter_context(RedisServer(tcp=True))
        remote = {
            **_PRIVATE,
            "TRITON_CACHE_MANAGER": "triton.runtime.cache:RemoteCacheManager",
            "TRITON_REMOTE_CACHE_BACKEND": "triton.runtime.cache:RedisRemoteCacheBackend",
            "TRITON_REDIS_HOST": "127.0.0.1",
            "TRITON_REDIS_PORT": str(redis.port),
        }
        store = {"KCOORD_STORE": str(root / "store"), "KCOORD_STORE_CREATE": "1"}
        plans = [
            Plan("a private cache for each rank, cold", STOCK, "private", more=_PRIVATE),
            Plan(SHARED, STOCK, "shared"),
            Plan("one shared TRITON_CACHE_DIR, rank 0 first, cold", STOCK, "rank0", "rank0"),
            Plan("Triton's RedisRemoteCacheBackend, cold", STOCK, "remote", more=remote),
            Plan("kcoord-torchrun, first run ever", OURS, "first", more=store),
            Plan("kcoord-torchrun, cold, run before", OURS, "pool", recorded="store/v2"),
            Plan("Triton's RedisRemoteCacheBackend, warm, a new node", STOCK, "remote2", more=remote),
            Plan("kcoord-torchrun, a warm store, a new node", OURS, "second", more=store),
        ]
        measure(result, _JOB, plans, ranks, root)
    return result
