"""Settings of torch around a compile that torch's own keys leave open."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import uuid
from operator import attrgetter
from typing import Any

_ATTENTION = (
    "flash_sdp_enabled",
    "mem_efficient_sdp_enabled",
    "math_sdp_enabled",
    "cudnn_sdp_enabled",
    "fp16_bf16_reduction_math_sdp_allowed",
)
_CASTING = ("cpu", "cuda", "xpu", "hpu", "mps", "mtia", "maia", "ipu", "xla")
_PRECISIONS = ("cudnn", "cudnn.conv", "cudnn.rnn", "mkldnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
_USUAL = {
    "autocast": {},
    "dtype": "torch.float32",
    "device": "cpu",
    "attention": [True, True, True, True, False],
    "priority": [1, 2, 0, 3, 4],
    "precisions": ["none", "tf32", "tf32", "none", "none", "none", "none"],
    "mkldnn": True,
}
"""The state of a process that changes nothing: torch's entries have torch's own keys there, and stock finds them."""
_ALONE = f"kcoord-alone-{uuid.uuid4().hex}-"


def ambient() -> dict[str, Any]:
    """The settings of this thread and this moment, as data.

    Torch 2.11 finds a unit that was traced under autocast to bfloat16 when it wants float16. Torch 2.13, too, finds one with
    flash attention where that is switched off.
    """
    import torch
    from torch.backends import opt_einsum

    comms = sys.modules.get("torch._inductor.config_comms")
    return _traced() | {
        "threads": torch.get_num_threads(),  # C++ is generated for so many
        "einsum": [opt_einsum.is_available(), opt_einsum.strategy],
        "comms": str(comms.save_config_portable()) if comms is not None else "",
    }


def _traced() -> dict[str, Any]:
    """Those that decide which operators a trace has, or with which precision they compute."""
    import torch

    return {
        "autocast": {
            device: str(torch.get_autocast_dtype(device))
            for device in (*_CASTING, torch._C._get_privateuse1_backend_name())
            if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        },
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "attention": [getattr(torch.backends.cuda, name)() for name in _ATTENTION],
        "priority": torch._C._get_sdp_priority_order(),
        "precisions": [attrgetter(f"{name}.fp32_precision")(torch.backends) for name in _PRECISIONS],
        "mkldnn": torch._C._get_mkldnn_enabled(),
    }


def tag() -> str:
    """A tag for torch's own keys; empty in the usual state."""
    state = _traced()
    if state == _USUAL:
        return ""
    return "kcoord-" + hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()[:16]


def tagged(alone: bool = False) -> contextlib.AbstractContextManager[object]:
    """A block in which torch's own caches, too, answer with nothing that was compiled in another state.

    `alone`: nor by another process.
    """
    from torch.compiler import config

    found = f"{_ALONE}{os.getpid()}" if alone else tag()
    if not found or found in config.cache_key_tag:
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[object] = config.patch(cache_key_tag=f"{config.cache_key_tag}{found}")
    return patch


def is_alone() -> bool:
    """True in a block that is tagged for this process."""
    from torch.compiler import config

    return _ALONE in config.cache_key_tag
