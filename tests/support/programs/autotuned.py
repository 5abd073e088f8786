"""A really autotuned kernel, on GPUs: each rank prints one line of JSON with what it chose, and launched.

kcoord-torchrun --nproc-per-node 8 tests/support/programs/autotuned.py [SHAPES]

Run it twice: cold, all ranks tune at once, and must end with one choice for each shape; warm, none tunes. Under ``torchrun``,
or with ``KCOORD_DISABLE=1``, the choices differ between ranks now and then: the configurations are of nearly one speed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

CONFIGS = [
    triton.Config({"BLOCK_M": m, "BLOCK_N": n, "BLOCK_K": 32}, num_warps=warps, num_stages=stages)
    for m in (64, 128)
    for n in (64, 128)
    for warps in (4, 8)
    for stages in (3, 4)
]


@triton.autotune(configs=CONFIGS, key=["M", "N", "K"])
@triton.jit
def matmul(a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        left = tl.load(a + rows[:, None] * K + (k + depth)[None, :], mask=rows[:, None] < M, other=0.0)
        right = tl.load(b + (k + depth)[:, None] * N + columns[None, :], mask=columns[None, :] < N, other=0.0)
        total += tl.dot(left, right)
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c + rows[:, None] * N + columns[None, :], total.to(tl.float16), mask=mask)


def launch(a: Any, b: Any) -> Any:
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), device=a.device, dtype=a.dtype)
    matmul[lambda meta: (triton.cdiv(m, meta["BLOCK_M"]), triton.cdiv(n, meta["BLOCK_N"]))](a, b, c, m, n, k)
    return c


def main(count: str = "4") -> None:
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    dist.init_process_group("gloo")  # two ranks may share a GPU
    shapes = []
    for size in [512 * (number + 1) for number in range(int(count))]:
        a, b = (torch.randn((size, size), device=device, dtype=torch.float16) for _ in range(2))
        dist.barrier()
        vars(matmul).pop("bench_time", None)
        begun = time.perf_counter()
        c = launch(a, b)
        torch.cuda.synchronize()
        shapes.append(
            {
                "shape": size,
                "choice": str(matmul.best_config),
                "tuned_here": "bench_time" in vars(matmul),
                "seconds": round(time.perf_counter() - begun, 3),
                "right": bool(torch.allclose(c, a @ b, atol=0.5, rtol=0.02)),
            }
        )
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, [shape["choice"] for shape in shapes])
    line = {
        "rank": dist.get_rank(),
        "gpu": torch.cuda.get_device_name(device),
        "agreed": all(choices == every[0] for choices in every),
        "shapes": shapes,
    }
    sys.stdout.write(json.dumps(line) + "\n")  # in one piece: ranks share a pipe
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
