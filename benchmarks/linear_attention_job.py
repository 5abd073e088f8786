"""One rank of the flash-linear-attention job: layers, forward and backward, whose kernels are tuned as they first run.

``LAYERS``: names of the kinds, with commas between them; all six if unset.
"""

from __future__ import annotations

import os

import torch
from fla import layers

from benchmarks.gpu_job import Operation, main

_HIDDEN, _BATCH, _LENGTH = 1024, 1, 2048
_KINDS: dict[str, dict[str, int]] = {
    "GatedLinearAttention": {},
    "MultiScaleRetention": {},
    "DeltaNet": {},
    "GatedDeltaNet": {"head_dim": 128, "num_heads": 8},
    "KimiDeltaAttention": {"head_dim": 128, "num_heads": 8},
    "GatedSlotAttention": {"num_slots": 64},
}


def operations(device: torch.device) -> list[Operation]:
    names = os.environ.get("LAYERS", ",".join(_KINDS)).split(",")
    made = [getattr(layers, name)(hidden_size=_HIDDEN, layer_idx=0, **_KINDS[name]) for name in names]
    return [_step(layer.to(device=device, dtype=torch.bfloat16)) for layer in made]


def _step(layer: torch.nn.Module) -> Operation:
    parameter = next(layer.parameters())

    def run() -> None:
        states = torch.randn(
            _BATCH, _LENGTH, _HIDDEN, device=parameter.device, dtype=parameter.dtype, requires_grad=True
        )
        layer(states)[0].float().square().mean().backward()

    return run


if __name__ == "__main__":
    main(operations)
