"""Kernels that Triton compiles again for values of an argument, by real compiles for a GPU that is not there.

specialized.py KERNEL: ``push`` is launched with ranks, ``sized`` with lengths that are constants, ``typed`` with types.
"""

from __future__ import annotations

import sys

import triton
import triton.language as tl
from triton.runtime.driver import driver

from tests.support.programs.tuned import Gpu


@triton.jit
def push(x, rank, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, tl.load(x + i) + rank)


@triton.jit
def sized(x, n: tl.constexpr, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + i, i, mask=i < n)


@triton.jit
def typed(x, y, z):
    tl.store(x, tl.load(y) + tl.load(z))


class Odd(triton.MockTensor):  # type: ignore[misc,unused-ignore]
    """At no multiple of 16."""

    @staticmethod
    def data_ptr() -> int:
        return 4


if __name__ == "__main__":
    driver.set_active(Gpu())
    blocks, types = [16, 32, 64, 128], ["fp16", "bf16", "fp32", "fp64"]
    if sys.argv[1] == "push":
        for block in blocks:
            for rank in range(8):
                push.warmup(Odd("fp32"), rank, BLOCK=block, grid=(1,))
    elif sys.argv[1] == "sized":
        for n in range(3, 16):
            sized.warmup(triton.MockTensor("fp32"), n, BLOCK=16, grid=(1,))
    else:
        for y in types:
            for z in types:
                typed.warmup(triton.MockTensor("fp32"), triton.MockTensor(y), triton.MockTensor(z), grid=(1,))
