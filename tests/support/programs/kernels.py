"""Kernels that compile for a GPU which is not there, and one that does not compile."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SM90 = GPUTarget("cuda", 90, 32)


@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr, FACTOR: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * FACTOR, mask=i < n)


@triton.jit
def broken(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), this_name_does_not_exist)  # noqa: F821


def build_scale(factor: int, compile: Any = None, target: GPUTarget = SM90) -> Any:
    signature = {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr", "FACTOR": "constexpr"}
    source = ASTSource(fn=scale, signature=signature, constexprs={"BLOCK": 128, "FACTOR": factor})
    return (compile or triton.compile)(source, target=target)


def build_broken(compile: Any = None) -> Any:
    source = ASTSource(fn=broken, signature={"x": "*fp32", "BLOCK": "constexpr"}, constexprs={"BLOCK": 64})
    return (compile or triton.compile)(source, target=SM90)
