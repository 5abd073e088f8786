"""Compiles small models as described by its argument, a JSON list of cases, and prints what each one computed, to the bit.

A case: `steps`, names of `STEPS`; `dtype`; `rows` of each call; `dynamic`; `grad`; `autocast`; `retain`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from typing import Any

if os.environ.get("STOCK") != "1":
    import kcoord

    kcoord.install()

import torch
import torch._functorch.aot_autograd as aot_autograd
from torch._inductor import config

WIDTH = 6
STEPS = {
    "product": lambda x, w: x @ w,
    "gelu": lambda x, w: torch.nn.functional.gelu(x),
    "softmax": lambda x, w: torch.softmax(x, -1),
    "norm": lambda x, w: torch.nn.functional.layer_norm(x, (WIDTH,)),
    "halves": lambda x, w: torch.cat(x.chunk(2, -1)[::-1], -1),
    "rows": lambda x, w: x * x.shape[0],
    "even": lambda x, w: x + 1 if x.shape[0] % 2 == 0 else x - 1,  # a guard
    "large": lambda x, w: x if x.shape[0] > 4 else x * 2,  # another one
    "in place": lambda x, w: (x * 2).add_(1),
    "break": lambda x, w: broken(x),
    "view": lambda x, w: x.t().contiguous().t(),
    "dropout": lambda x, w: torch.nn.functional.dropout(x, 0.5),
}
traces = 0


@torch._dynamo.disable
def broken(x: torch.Tensor) -> torch.Tensor:
    return x + 0.5


def computed(case: dict[str, Any]) -> str:
    """A digest of losses, gradients and the strides of outputs."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dtype = getattr(torch, case["dtype"])
    weight = (
        torch.linspace(-1, 1, WIDTH * WIDTH, dtype=torch.float64)
        .reshape(WIDTH, WIDTH)
        .to(dtype)
        .requires_grad_(case["grad"])
    )

    def model(x: torch.Tensor) -> torch.Tensor:
        for step in case["steps"]:
            x = STEPS[step](x, weight)
        return x

    compiled = torch.compile(model, dynamic=case["dynamic"])
    found = hashlib.sha256()
    for rows in case["rows"]:
        inputs = torch.linspace(-2, 2, rows * WIDTH, dtype=torch.float64).reshape(rows, WIDTH).to(dtype)
        autocast = torch.autocast("cpu", torch.bfloat16) if case["autocast"] else contextlib.nullcontext()
        with autocast:
            outputs = compiled(inputs)
        if outputs.requires_grad:
            outputs.float().square().mean().backward(retain_graph=case["retain"])
            if case["retain"]:
                outputs.float().mean().backward()
        found.update(repr((outputs.stride(), outputs.dtype, outputs.double().tolist())).encode())
    found.update(repr(weight.grad.double().tolist() if weight.grad is not None else None).encode())
    return found.hexdigest()


def main() -> None:
    native = aot_autograd.aot_stage1_graph_capture

    def counted(*arguments: Any, **keywords: Any) -> Any:
        global traces
        traces += 1
        return native(*arguments, **keywords)

    aot_autograd.aot_stage1_graph_capture = counted
    config.fallback_by_default = True  # no C++ to build
    for case in json.loads(sys.argv[1]):
        before = traces
        try:
            result = computed(case)
        except Exception as error:  # noqa: BLE001 - stock's, or ours: they are compared
            result = type(error).__name__
        sys.stdout.write(json.dumps([result, traces - before]) + "\n")


if __name__ == "__main__":
    main()
