"""One rank of the Liger-Kernel job: 80 operations, 123 kernels, forward and backward. ``WIDTHS`` are those of the operations."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import liger_kernel.transformers.functional as liger
import torch
from torch import Tensor

from benchmarks.gpu_job import Operation, main


def operations(device: torch.device) -> list[Operation]:
    """Ten operations of a transformer's training step, in two types and four widths."""

    def tensor(*shape: int, dtype: torch.dtype) -> Tensor:
        return (torch.randn(*shape, device=device, dtype=dtype) * 0.1).requires_grad_()

    def labels(classes: int, rows: int) -> Tensor:
        return torch.randint(0, classes, (rows,), device=device)

    def logs(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return tensor(rows, width, dtype=dtype).log_softmax(-1).detach().requires_grad_(), tensor(
            rows, width, dtype=dtype
        )

    def step(function: Callable[..., Any], arguments: Callable[[], tuple[Any, ...]]) -> Operation:
        def run() -> None:
            found = function(*arguments())
            parts = found if isinstance(found, tuple) else (found,)
            loss = sum(p.float().sum() for p in parts if torch.is_tensor(p) and p.requires_grad)
            if torch.is_tensor(loss):
                loss.backward()

        return run

    def of(width: int, dtype: torch.dtype) -> list[Operation]:
        def t(*shape: int) -> Tensor:
            return tensor(*shape, dtype=dtype)

        def divergence(log_target: bool) -> tuple[Tensor, Tensor]:
            p, q = logs(512, width, dtype)
            return p, (q.log_softmax(-1) if log_target else q.softmax(-1)).detach()

        def softmaxes() -> tuple[Tensor, Tensor]:
            return t(512, width).softmax(-1).detach().requires_grad_(), t(512, width).softmax(-1).detach()

        def fused() -> tuple[Tensor, Tensor, Tensor]:
            return t(256, width), t(width * 2, width), labels(width * 2, 256)

        return [
            step(liger.liger_rms_norm, lambda: (t(512, width), t(width), 1e-6)),
            step(liger.liger_layer_norm, lambda: (t(512, width), t(width), t(width), 1e-6)),
            step(liger.liger_swiglu, lambda: (t(512, width), t(512, width))),
            step(liger.liger_geglu, lambda: (t(512, width), t(512, width))),
            step(liger.liger_cross_entropy, lambda: (t(512, width * 4), labels(width * 4, 512))),
            step(liger.liger_kl_div, lambda: divergence(log_target=False)),
            step(liger.liger_jsd, lambda: divergence(log_target=True)),
            step(liger.liger_softmax, lambda: (t(512, width),)),
            step(liger.liger_tvd, softmaxes),
            step(liger.liger_fused_linear_cross_entropy, fused),
        ]

    widths = [int(width) for width in os.environ.get("WIDTHS", "1024,2048,4096,8192").split(",")]
    types = (torch.bfloat16, torch.float32)
    return [o for dtype in types for width in widths for o in of(width, dtype)]


if __name__ == "__main__":
    main(operations)
