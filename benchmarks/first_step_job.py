"""One rank of the whole-job benchmark: imports torch, as a training script does, and compiles real kernels for sm_90.

``first_step_job.py KERNELS OFFSET``; started by torchrun. Rank 0 prints one line of JSON: wall seconds from the launch
(``LAUNCHED``) until the slowest rank has all kernels, its seconds from the first kernel to the last, and the ranks' compiles.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch.distributed as dist
import triton

from benchmarks.cluster.profile import build, kernels


def main(count: str, offset: str) -> None:
    dist.init_process_group("gloo")
    every = list(kernels())
    mine = every[int(offset) :: len(every) // int(count)][: int(count)]
    compiled: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(not cache_hit)
    begun = time.time()
    for _, kernel, constants, options in mine:
        build(kernel, constants, options)
    ended = time.time()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (ended - float(os.environ["LAUNCHED"]), ended - begun, sum(compiled)))
    if dist.get_rank() == 0:
        walls, phases, compiles = zip(*found, strict=True)
        sys.stdout.write(json.dumps({"wall": max(walls), "phase": max(phases), "compiles": sum(compiles)}) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
