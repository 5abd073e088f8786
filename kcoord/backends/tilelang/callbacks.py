"""The functions that a script registers to rewrite generated code. They are in the key, by content.

TVM keeps them behind handles that do not show the Python function, so they are noted as they are registered.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from kcoord.keys.function.walk import content_of

_KINDS = ("cuda_postproc", "hip_postproc", "c_host_postproc", "metal_postproc")
_noted: dict[str, tuple[Any, Any]] = {}
"""The Python function of each name, and TVM's handle of it."""


def watch() -> None:
    """Note each function that is registered from now on."""
    import tvm_ffi.core

    core: Any = tvm_ffi.core
    native = core._register_global_func

    @functools.wraps(native)
    def register_global_func(name: str, function: Any, override: bool) -> Any:
        registered = native(name, function, override)
        _note(str(name), function)
        return registered

    core._register_global_func = register_global_func


def _note(name: str, function: Any) -> None:
    is_own = str(getattr(function, "__module__", "")).startswith("tilelang.")  # in the key by TileLang's version
    if name.startswith("tilelang_callback_") and not is_own:
        _noted[name] = function, _handle(name)


def _handle(name: str) -> Any:
    import tvm_ffi

    return tvm_ffi.get_global_func(name, allow_missing=True)


def problem() -> str:
    """Why the functions that are registered now cannot be in a key; empty if they can."""
    for kind in _KINDS:
        name = f"tilelang_callback_{kind}"
        found = _handle(name)
        if found is not None and (name not in _noted or not found.same_as(_noted[name][1])):
            return f"{name} was registered before kcoord was installed"
    return ""


def factors() -> Mapping[str, Any]:
    """The content of each function. Raises `KeyFactorError` for one that reads a value without identity."""
    return {name: content_of(function).factors() for name, (function, _) in sorted(_noted.items())}
