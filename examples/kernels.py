"""Hand-written Triton kernels for a small transformer, each with a plain PyTorch twin for machines without a GPU.

Every stage of the model has its own sequence length, width and tile, and therefore its own set of seven kernels:
softmax and layer norm, forward and backward, and a matrix multiplication in the three layouts that a linear layer needs.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_HOPPER, _AMPERE, _MI300 = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32), GPUTarget("hip", "gfx942", 64)


def _links_for_amd() -> bool:
    """Triton 3.4 looks for ROCm's linker; later ones bring their own."""
    places = (os.environ.get("TRITON_HIP_LLD_PATH", ""), "/opt/rocm/llvm/bin/ld.lld", "/usr/bin/ld.lld")
    return not triton.__version__.startswith("3.4.") or any(Path(place).is_file() for place in places)


TARGETS = (_HOPPER, _MI300 if _links_for_amd() else _AMPERE)
"""The targets of a machine without a GPU: NVIDIA H100 and H200, and AMD MI300 if its linker is there."""

_NORM_PROGRAMS = 64  # each sums the gradients of its rows, so that nothing needs an atomic


@triton.jit
def softmax_forward(x_ptr, y_ptr, cols, scale, BLOCK: tl.constexpr):
    """One row of softmax(scale · x)."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * cols + at, mask=at < cols, other=float("-inf")) * scale
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + row * cols + at, e / tl.sum(e, axis=0), mask=at < cols)


@triton.jit
def softmax_backward(y_ptr, dy_ptr, dx_ptr, cols, scale, BLOCK: tl.constexpr):
    """One row of dx = scale · y · (dy − Σ y·dy)."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    y = tl.load(y_ptr + row * cols + at, mask=at < cols, other=0.0)
    dy = tl.load(dy_ptr + row * cols + at, mask=at < cols, other=0.0)
    tl.store(dx_ptr + row * cols + at, scale * y * (dy - tl.sum(y * dy, axis=0)), mask=at < cols)


@triton.jit
def layer_norm_forward(x_ptr, weight_ptr, bias_ptr, y_ptr, mean_ptr, rstd_ptr, cols, eps, BLOCK: tl.constexpr):
    """One row; the mean and the reciprocal deviation are kept for the backward pass."""
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < cols
    x = tl.load(x_ptr + row * cols + at, mask=inside, other=0.0)
    mean = tl.sum(x, axis=0) / cols
    centred = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, axis=0) / cols + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0)
    tl.store(y_ptr + row * cols + at, centred * rstd * weight + bias, mask=inside)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)


@triton.jit
def layer_norm_backward(
    x_ptr, weight_ptr, mean_ptr, rstd_ptr, dy_ptr, dx_ptr, dweight_ptr, dbias_ptr, rows, cols, BLOCK: tl.constexpr
):
    """Every n-th row; one partial sum of the weight's and of the bias' gradient per program."""
    program = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < cols
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    dweight = tl.zeros([BLOCK], dtype=tl.float32)
    dbias = tl.zeros([BLOCK], dtype=tl.float32)
    for row in range(program, rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * cols + at, mask=inside, other=0.0)
        dy = tl.load(dy_ptr + row * cols + at, mask=inside, other=0.0)
        rstd = tl.load(rstd_ptr + row)
        normed = tl.where(inside, (x - tl.load(mean_ptr + row)) * rstd, 0.0)
        scaled = dy * weight
        along = tl.sum(scaled * normed, axis=0) / cols
        dx = (scaled - tl.sum(scaled, axis=0) / cols - normed * along) * rstd
        tl.store(dx_ptr + row * cols + at, dx, mask=inside)
        dweight += dy * normed
        dbias += dy
    tl.store(dweight_ptr + program * cols + at, dweight, mask=inside)
    tl.store(dbias_ptr + program * cols + at, dbias, mask=inside)


@triton.jit
def matmul(
    a_ptr, b_ptr, c_ptr, M, N, K,
    TRANS_A: tl.constexpr, TRANS_B: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One tile of C[M, N] = A·B, in bfloat16 with float32 sums. A transposed operand is stored as [K, M] or [N, K]."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sums = tl.zeros([BLOCK_M, BLOCK_N], dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_at = (k[None, :] * M + m[:, None]) if TRANS_A else (m[:, None] * K + k[None, :])
        b_at = (n[None, :] * K + k[:, None]) if TRANS_B else (k[:, None] * N + n[None, :])
        a = tl.load(a_ptr + a_at, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + b_at, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        sums += tl.dot(a.to(tl.bfloat16), b.to(tl.bfloat16))
    tl.store(c_ptr + m[:, None] * N + n[None, :], sums, mask=(m[:, None] < M) & (n[None, :] < N))


@dataclass(frozen=True)
class Stage:
    """The shapes of one stage of the model; all are multiples of 16."""

    sequence: int
    width: int
    tile: tuple[int, int, int]

    @property
    def tiles(self) -> dict[str, int]:
        return dict(zip(("BLOCK_M", "BLOCK_N", "BLOCK_K"), self.tile, strict=True))

    def kernels(self) -> list[tuple[Any, dict[str, Any]]]:
        """This stage's kernels, each with its constants."""
        return [
            (matmul, {"TRANS_A": False, "TRANS_B": True} | self.tiles),
            (layer_norm_forward, {"BLOCK": triton.next_power_of_2(self.width)}),
            (softmax_forward, {"BLOCK": triton.next_power_of_2(self.sequence)}),
            (matmul, {"TRANS_A": False, "TRANS_B": False} | self.tiles),
            (matmul, {"TRANS_A": True, "TRANS_B": False} | self.tiles),
            (layer_norm_backward, {"BLOCK": triton.next_power_of_2(self.width)}),
            (softmax_backward, {"BLOCK": triton.next_power_of_2(self.sequence)}),
        ]


STAGES = (
    Stage(sequence=128, width=64, tile=(64, 64, 32)),
    Stage(sequence=64, width=128, tile=(128, 64, 32)),
    Stage(sequence=32, width=256, tile=(128, 128, 32)),
    Stage(sequence=16, width=512, tile=(128, 128, 64)),
)


def ahead_of_time() -> Iterator[tuple[Any, dict[str, Any], GPUTarget]]:
    """Every kernel of every stage for every target, in the model's order."""
    for stage in STAGES:
        for kernel, constants in stage.kernels():
            for target in TARGETS:
                yield kernel, constants, target


def compile_ahead(kernel: Any, constants: dict[str, Any], target: GPUTarget) -> Any:
    """Compile without a GPU, specialized as in a launch of the model: all pointers and sizes divide by 16."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        return "*fp32" if name.endswith("_ptr") else "fp32" if name in ("scale", "eps") else "i32"

    signature = {name: kind(name) for name in kernel.arg_names}
    attrs = {(i,): [["tt.divisibility", 16]] for i, k in enumerate(signature.values()) if k in ("*fp32", "i32")}
    return triton.compile(ASTSource(kernel, signature, constexprs=constants, attrs=attrs), target=target)


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        x = x.contiguous()
        y = torch.empty_like(x)
        cols = x.shape[-1]
        ctx.scale = scale
        softmax_forward[(x.numel() // cols,)](x, y, cols, scale, BLOCK=triton.next_power_of_2(cols))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (y,) = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(y)
        cols = y.shape[-1]
        softmax_backward[(y.numel() // cols,)](y, dy, dx, cols, ctx.scale, BLOCK=triton.next_power_of_2(cols))
        return dx, None


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        cols = x.shape[-1]
        rows = x.numel() // cols
        y = torch.empty_like(x)
        mean, rstd = x.new_empty(rows), x.new_empty(rows)
        block = triton.next_power_of_2(cols)
        layer_norm_forward[(rows,)](x, weight, bias, y, mean, rstd, cols, eps, BLOCK=block)
        ctx.save_for_backward(x, weight, mean, rstd)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        dy = dy.contiguous()
        cols = x.shape[-1]
        rows = x.numel() // cols
        dx = torch.empty_like(x)
        dweight, dbias = x.new_empty(_NORM_PROGRAMS, cols), x.new_empty(_NORM_PROGRAMS, cols)
        layer_norm_backward[(_NORM_PROGRAMS,)](
            x, weight, mean, rstd, dy, dx, dweight, dbias, rows, cols, BLOCK=triton.next_power_of_2(cols)
        )
        return dx, dweight.sum(0), dbias.sum(0), None


def _multiply(a: Tensor, b: Tensor, trans_a: bool, trans_b: bool, stage: Stage) -> Tensor:
    m, k = a.shape[::-1] if trans_a else a.shape
    n = b.shape[0] if trans_b else b.shape[1]
    c = a.new_empty(m, n)
    grid = (triton.cdiv(m, stage.tile[0]), triton.cdiv(n, stage.tile[1]))
    matmul[grid](a, b, c, m, n, k, TRANS_A=trans_a, TRANS_B=trans_b, **stage.tiles)
    return c


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stage: Stage) -> Tensor:
        flat = x.reshape(-1, x.shape[-1]).contiguous()
        ctx.save_for_backward(flat, weight)
        ctx.stage, ctx.shape = stage, x.shape
        return _multiply(flat, weight, False, True, stage).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        flat, weight = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1]).contiguous()
        dx = _multiply(dy, weight, False, False, ctx.stage)
        return dx.view(ctx.shape), _multiply(dy, flat, True, False, ctx.stage), None


def softmax(x: Tensor, scale: float) -> Tensor:
    """softmax(scale · x) over the last axis."""
    return _Softmax.apply(x, scale) if x.is_cuda else F.softmax(x * scale, dim=-1)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """Layer norm over the last axis."""
    return _LayerNorm.apply(x, weight, bias, eps) if x.is_cuda else F.layer_norm(x, weight.shape, weight, bias, eps)


def linear(x: Tensor, weight: Tensor, stage: Stage) -> Tensor:
    """x · weightᵀ, for a weight of shape [out, in]."""
    return _Linear.apply(x, weight, stage) if x.is_cuda else F.linear(x, weight)


def check(stage: Stage, device: torch.device) -> None:
    """Compare the kernels of `stage` with PyTorch, values and gradients. Raises AssertionError if one is wrong."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    def compare(ours: Any, theirs: Any, inputs: tuple[Tensor, ...], dy: Tensor, tolerance: float) -> None:
        results = []
        for function in (ours, theirs):
            leaves = [t.clone().requires_grad_() for t in inputs]
            y = function(*leaves)
            results.append((y.detach(), *torch.autograd.grad(y, leaves, dy)))
        torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)

    rows, width, sequence = 256, stage.width, stage.sequence
    scores, dscores = random(rows, sequence), random(rows, sequence)
    compare(lambda x: _Softmax.apply(x, 0.5), lambda x: F.softmax(x * 0.5, dim=-1), (scores,), dscores, 1e-5)

    x, weight, bias, dy = random(rows, width), random(width), random(width), random(rows, width)
    compare(
        lambda x, w, b: _LayerNorm.apply(x, w, b, 1e-5),
        lambda x, w, b: F.layer_norm(x, w.shape, w, b, 1e-5),
        (x, weight, bias),
        dy,
        1e-4,
    )

    # rounded to bfloat16 first, as the kernel does, so that only the order of the sums differs
    x, weight, dy = (t.bfloat16().float() for t in (x, random(2 * width, width), random(rows, 2 * width)))
    compare(lambda x, w: _Linear.apply(x, w, stage), F.linear, (x, weight), dy, 1e-3)
