"""A training job's rank on a GPU, whose operations are its kernels: what the jobs of several libraries have in common.

``--mode rank0`` lets rank 0 go first, ``split`` deals the operations out by hand, ``together`` runs all on every rank. Rank 0
prints one line of JSON: wall seconds (the slowest rank's), seconds since the launch (``LAUNCHED``), compiles and loads summed
over the ranks, unique kernels. With ``PRIVATE`` each rank has a ``TRITON_CACHE_DIR`` of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import triton

Operation = Callable[[], None]


def main(operations: Callable[[torch.device], list[Operation]]) -> None:
    """Run `operations` on this rank's GPU; ranks share GPUs where there are more ranks than those."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", default="together", choices=["together", "rank0", "split"])
    mode = parser.parse_args().mode
    if "PRIVATE" in os.environ:
        os.environ["TRITON_CACHE_DIR"] += f"/{os.environ['RANK']}"
    if not hasattr(triton.knobs.cache, "redis"):  # so RedisRemoteCacheBackend raises, in Triton 3.6 and 3.9
        triton.knobs.cache.redis = triton.knobs.redis
    rank, world, local = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", local % gpus)
    torch.cuda.set_device(device)
    if world > gpus:  # NCCL allows one rank a GPU
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("nccl", device_id=device)
    compiled: list[str] = []
    loaded: list[str] = []

    def listen(*, metadata: dict[str, Any], cache_hit: bool, **_: Any) -> None:
        (loaded if cache_hit else compiled).append(metadata["hash"])

    triton.knobs.compilation.listener = listen
    todo = operations(device)

    def run(indices: Iterable[int]) -> None:
        for index in indices:
            todo[index]()
            if rank == 0:
                print(
                    f"{index + 1} of {len(todo)} after {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True
                )

    everything = range(len(todo))
    torch.ones(8, device=device).sum().item()
    dist.barrier()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    if mode == "rank0":
        run(everything if rank == 0 else ())
        dist.barrier()
        run(() if rank == 0 else everything)
    else:
        if mode == "split":
            run(i for i in everything if i % world == rank)
            dist.barrier()
        run(everything)
    torch.cuda.synchronize()
    dist.barrier()
    wall = time.perf_counter() - begun
    found: list[Any] = [None] * world
    dist.all_gather_object(found, (compiled, len(loaded)))
    if rank == 0:
        hashes = [h for each, _ in found for h in each]
        line = {
            "wall": wall,
            "whole": time.time() - float(os.environ.get("LAUNCHED", "nan")),
            "compiles": len(hashes),
            "unique": len(set(hashes)),
            "loads": sum(n for _, n in found),
        }
        print(json.dumps(line), flush=True)
    dist.destroy_process_group()
