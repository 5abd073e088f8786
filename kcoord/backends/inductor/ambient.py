"""Settings of torch around a compile that its own keys leave open, in all versions or in some."""

from __future__ import annotations

import sys
from typing import Any


def ambient() -> dict[str, Any]:
    """The settings of this thread and this moment, as data.

    Torch 2.11 finds a unit that was traced under autocast to bfloat16 when it wants float16. Torch 2.13, too, finds one with
    flash attention where that is switched off.
    """
    import torch

    cuda, comms = torch.backends.cuda, sys.modules.get("torch._inductor.config_comms")
    return {
        "autocast": {
            device: str(torch.get_autocast_dtype(device))
            for device in torch._C._autocast_supported_devices()
            if torch.is_autocast_enabled(device)
        },
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "threads": torch.get_num_threads(),  # C++ is generated for so many
        "attention": {
            name: getattr(cuda, name)()
            for name in ("flash_sdp_enabled", "mem_efficient_sdp_enabled", "math_sdp_enabled", "cudnn_sdp_enabled",
                         "fp16_bf16_reduction_math_sdp_allowed")
            if hasattr(cuda, name)
        },
        "mkldnn": torch._C._get_mkldnn_enabled(),
        "comms": str(comms.save_config_portable()) if comms is not None else "",
    }  # fmt: skip
