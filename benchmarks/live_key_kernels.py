"""The function and the kernel whose keys `benchmarks.live_key` measures."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

import kcoord

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
constants = types.ModuleType("constants")
vars(constants).update(TILE=64, DEPTH=3, SCALE=2.0, NAME="layer")
SIZE, RATE, MODE, SHAPE = 1, 2.0, "fast", (4, 5)
LIST, TABLE = [1, 2, 3], {"a": 1}


@kcoord.compile_once(scope=kcoord.Scope.TARGET)
def build(a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, n: int, mode: str = "fast", *, staging: Path) -> None:
    values = (constants.TILE, constants.DEPTH, constants.SCALE, constants.NAME, SIZE, RATE, MODE, SHAPE, LIST, TABLE)
    (staging / "kernel").write_text(f"{values}")


@triton.jit
def double(x):  # type: ignore[no-untyped-def]
    return x * 2


@triton.jit
def kernel(a, b, c, d, e, f, n, m, BLOCK: tl.constexpr, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.load(a + i, mask=i < n) + tl.load(b + i, mask=i < n) + tl.load(c + i, mask=i < n)
    s += tl.load(d + i, mask=i < n) + double(tl.load(e + i, mask=i < n))
    tl.store(f + i, s * FACTOR * constants.TILE * constants.DEPTH, mask=i < n)


class _StandIn:
    """A driver for a machine without GPU: kernels are compiled for sm_90, and not launched."""

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def make_driver() -> None:
    if not torch.cuda.is_available():
        driver.set_active(_StandIn())
