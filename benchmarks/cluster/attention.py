"""A flash-attention forward kernel, compiled by `benchmarks.cluster.profile` and never run."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def attention_forward(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, sequence, scale,
    HEAD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one head, in bfloat16 with float32 sums; keys and values are read once."""
    block, head = tl.program_id(0), tl.program_id(1)
    base = head * sequence * HEAD
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, HEAD)
    q = tl.load(q_ptr + base + m[:, None] * HEAD + d[None, :], mask=m[:, None] < sequence, other=0.0).to(tl.bfloat16)
    most = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, HEAD], tl.float32)
    end = (block + 1) * BLOCK_M if CAUSAL else sequence
    for start in range(0, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        k = tl.load(k_ptr + base + n[None, :] * HEAD + d[:, None], mask=n[None, :] < sequence, other=0.0)
        scores = tl.dot(q, k.to(tl.bfloat16)) * scale
        inside = n[None, :] < sequence
        if CAUSAL:
            inside = inside & (n[None, :] <= m[:, None])
        scores = tl.where(inside, scores, float("-inf"))
        highest = tl.maximum(most, tl.max(scores, axis=1))
        weights = tl.exp2(scores - highest[:, None])
        shrink = tl.exp2(most - highest)
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.load(v_ptr + base + n[:, None] * HEAD + d[None, :], mask=n[:, None] < sequence, other=0.0)
        sums = tl.dot(weights.to(tl.bfloat16), v.to(tl.bfloat16), sums * shrink[:, None])
        most = highest
    out = sums / total[:, None]
    tl.store(out_ptr + base + m[:, None] * HEAD + d[None, :], out, mask=m[:, None] < sequence)
    tl.store(lse_ptr + head * sequence + m, most + tl.log2(total), mask=m < sequence)
