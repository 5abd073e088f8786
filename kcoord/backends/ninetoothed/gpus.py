"""The GPU that NineToothed's processes compile for: the first one of the node.

NineToothed opens it in processes of its own. This process may fork later, or choose another GPU, and so does not open CUDA to
find out: the driver's files name the GPUs' models.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from kcoord.errors import KeyFactorError
from kcoord.keys.device import GPUTarget, current_device

_DRIVER = Path("/proc/driver/nvidia/gpus")
_LIMITS = ("max_num_regs", "max_nram_size", "max_shared_mem")  # which NineToothed reads
_MODEL = "Model:"


class Gpu(NamedTuple):
    """`factors` identify it in a key. `target`: None if it is not known before CUDA is initialized."""

    factors: dict[str, Any]
    target: GPUTarget | None


def gpu() -> Gpu:
    """Read live. Raises `KeyFactorError` if it is not known here, and what Triton's driver raises."""
    import torch
    import triton

    if os.environ.get("TRITON_DEFAULT_BACKEND", "nvidia") == "nvidia":
        found = _models() if torch.version.cuda else []
        if len(found) > 1:
            raise KeyFactorError("this node has GPUs of several models")
        if found:
            return Gpu({"models": found}, current_device().target if torch.cuda.is_initialized() else None)
        if (torch.version.cuda or torch.version.hip) and not torch.cuda.is_initialized():
            raise KeyFactorError("its GPU is not known yet: call torch.cuda.set_device first")
    driver = triton.runtime.driver.active
    target = driver.get_current_target()
    limits = driver.utils.get_device_properties(driver.get_current_device())
    made = GPUTarget(target.backend, target.arch, target.warp_size)
    return Gpu({"target": made, "limits": {name: limits[name] for name in _LIMITS if name in limits}}, made)


def _models() -> list[str]:
    """Of this node's GPUs, each once."""
    found: set[str] = set()
    for file in _DRIVER.glob("*/information"):
        lines = file.read_text().splitlines()
        found.update(line.removeprefix(_MODEL).strip() for line in lines if line.startswith(_MODEL))
    return sorted(found)
