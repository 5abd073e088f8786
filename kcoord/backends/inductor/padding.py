"""Inductor's choices to pad matrix products: the first rank that has measured one decides for the others, and for later jobs.

Torch measures while it compiles a unit, before it makes the keys of the unit's graphs. Ranks that chose differently would each
compile these graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import Scope, current_device

_PADS = {b"pad": True, b"leave": False}

_begun: dict[str, float] = {}  # by torch's key: when this process found that nobody had measured


def known(native: Callable[..., bool | None], key: str, *args: Any, **kwargs: Any) -> bool | None:
    """As ``get_cached_should_pad``: None if nobody has measured. `key` has the shapes, the strides and the types."""
    found = native(key, *args, **kwargs)
    return _known(key) if found is None else found


@fails_open(lambda key: None)
def _known(key: str) -> bool | None:
    coordinator = coordinator_in_use()
    if coordinator is None:
        return None
    content = coordinator.choices.get(_key(key))
    _begun[key] = time.perf_counter()
    return _PADS.get(content or b"")


def decided(native: Callable[..., bool], key: str, *args: Any, **kwargs: Any) -> bool:
    """As ``is_padded_faster``, which keeps what this rank has measured in torch's cache."""
    mine = native(key, *args, **kwargs)
    return _decided(key, mine)


@fails_open(lambda key, mine: mine)
def _decided(key: str, mine: bool) -> bool:
    from torch._inductor.fx_passes.pad_mm import set_cached_should_pad

    coordinator = coordinator_in_use()
    if coordinator is None:
        return mine
    now = time.perf_counter()
    took, content = now - _begun.pop(key, now), b"pad" if mine else b"leave"
    held = _PADS.get(coordinator.choices.offer(_key(key), content, took, str(current_device())) or b"", mine)
    if held != mine:
        set_cached_should_pad(key, held)
    return held


def _key(key: str) -> CacheKey:
    from torch._inductor import config
    from torch._inductor.codecache import torch_key

    options = config.post_grad_fusion_options.get("shape_padding_multiplier")
    found = CacheKey.of("inductor-padding", "pad_mm", product=key, options=str(options), torch=torch_key().hex())
    return found.on(current_device(), Scope.MODEL)
