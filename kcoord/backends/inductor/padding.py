"""Inductor's choices to pad matrix products: the first rank that has measured one decides for the others, and for later jobs.

Torch measures while it compiles a unit, before it makes the keys of the unit's graphs. Ranks that chose differently would each
compile these graphs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.backends.reliances import Part
from kcoord.backends.wrapping import wraps
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import Scope, current_device
from kcoord.rank.coordinator import Coordinator

_PAD = "_inductor.fx_passes.pad_mm"
_KNOWN, _DECIDED = f"{_PAD}:get_cached_should_pad", f"{_PAD}:is_padded_faster"
PADDING = Part(
    "inductor", "torch", "padding of matrix products",
    {_KNOWN: "key", f"{_PAD}:set_cached_should_pad": "key value", _DECIDED: "key ..."},
)  # fmt: skip

_PADS = {b"pad": True, b"leave": False}

_held: dict[str, bool] = {}  # by torch's key: the choice that holds in this process
_begun: dict[str, float] = {}  # by torch's key: when this process found that nobody had measured


def hook() -> None:
    """Idempotent."""
    if PADDING.holds():
        PADDING.wrap(_KNOWN, _knowing)
        PADDING.wrap(_DECIDED, _deciding)


def _knowing(native: Callable[..., bool | None]) -> Callable[..., bool | None]:
    @wraps(native)
    def get_cached_should_pad(key: str, *args: Any, **kwargs: Any) -> bool | None:
        """None if nobody has measured. `key` has the shapes, the strides and the types."""
        return _known(key, native(key, *args, **kwargs))

    return get_cached_should_pad


def _deciding(native: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(native)
    def is_padded_faster(key: str, *args: Any, **kwargs: Any) -> bool:
        """Torch's keeps what this rank has measured in torch's cache."""
        return _decided(key, native(key, *args, **kwargs))

    return is_padded_faster


@fails_open(lambda key, found: found)
def _known(key: str, found: bool | None) -> bool | None:
    from torch._inductor import config

    if getattr(config, "deterministic", False):  # torch measures nothing, and takes no choice that was made by time
        return found
    coordinator = None if key in _held else coordinator_in_use()
    if coordinator is None:
        return _held.get(key, found)
    if found is not None:  # an earlier run, or a rank of this node that measures at this moment
        return _agreed(coordinator, key, found, 0.0)
    choice = _PADS.get(coordinator.choices.get(_key(key)) or b"")
    if choice is None:
        _begun[key] = time.perf_counter()
    else:
        _held[key] = choice
    return choice


@fails_open(lambda key, mine: mine)
def _decided(key: str, mine: bool) -> bool:
    coordinator, now = coordinator_in_use(), time.perf_counter()
    return mine if coordinator is None else _agreed(coordinator, key, mine, now - _begun.pop(key, now))


def _agreed(coordinator: Coordinator, key: str, mine: bool, seconds: float) -> bool:
    """The choice that holds for all ranks: an earlier one, or this rank's, which took so many `seconds`."""
    from torch._inductor.fx_passes.pad_mm import set_cached_should_pad

    content = b"pad" if mine else b"leave"
    held = _PADS.get(coordinator.choices.offer(_key(key), content, seconds, str(current_device())) or b"", mine)
    if held != mine:
        set_cached_should_pad(key, held)
    return _held.setdefault(key, held)


def _key(key: str) -> CacheKey:
    from torch._inductor import config
    from torch._inductor.codecache import torch_key
    from torch.compiler import config as compiler

    found = CacheKey.of(
        "inductor-padding",
        "pad_mm",
        product=key,
        multiplier=str(config.post_grad_fusion_options.get("shape_padding_multiplier")),
        tag=compiler.cache_key_tag,
        torch=torch_key().hex(),
    )
    return found.on(current_device(), Scope.MODEL)
