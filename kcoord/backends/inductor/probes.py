"""Inductor's probes of this machine: six small programs, each compiled and loaded once to learn which vector instructions work.

That a program loads is a choice, by compiler, processor and torch, which other nodes of the same kind believe. A failure is not
shared, since the disk may be its cause.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.host import cpu_features, host_abi
from kcoord.keys.tools.toolchain import tool_factors, tools
from kcoord.rank.coordinator import Coordinator

_LOADS = b"loads"


def check_build(native: Callable[..., bool], isa: Any, code: str) -> bool:
    """As ``VecISA.check_build``: whether a program with the instructions of `isa` can be built, and loads."""
    known = _known(isa, code)
    if known is True:
        return True
    begun = time.perf_counter()
    loads = native(isa, code)
    if loads and known is not None:
        coordinator, key = known
        _tell(coordinator, key, time.perf_counter() - begun)
    return loads


@fails_open(lambda isa, code: None)
def _known(isa: Any, code: str) -> Any:
    """True, or the coordinator and the key to offer the answer for; None if it is not shared."""
    from torch._inductor.exc import InvalidCxxCompiler

    coordinator = coordinator_in_use()
    if coordinator is None:
        return None
    try:
        key = _key(isa, code, coordinator)
    except InvalidCxxCompiler:  # torch raises it itself
        return None
    return True if coordinator.choices.get(key) == _LOADS else (coordinator, key)


@fails_open(lambda *arguments: None)
def _tell(coordinator: Coordinator, key: CacheKey, seconds: float) -> None:
    coordinator.choices.offer(key, _LOADS, seconds)


def _key(isa: Any, code: str, coordinator: Coordinator) -> CacheKey:
    import torch
    from torch._inductor.cpp_builder import get_cpp_compiler

    return CacheKey.of(
        "inductor-probe",
        str(isa),
        code=code,
        flags=(isa.build_arch_flags(), isa.build_macro()),
        torch=(str(torch.__version__), torch.version.git_version),
        cpu=cpu_features(),
        abi=host_abi(),
        **tool_factors(tools([get_cpp_compiler()], coordinator.settings.local_dir)),
    )
