"""LLVM's options that the script has set in this process: ``with flydsl.compiler.llvm_options.llvm_options(...)``.

They change code, and LLVM does not list them: they are noted as they are set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kcoord.backends.wrapping import wraps

CALLS = {f"_mlir._mlir_libs._mlirDialectsFly:set_llvm_option_{kind}": "" for kind in ("bool", "int", "str")}
"""Functions in C++, and so without signatures. Each returns the value of before."""
_before: dict[str, Any] = {}
_now: dict[str, Any] = {}


def noting(native: Any) -> Callable[..., Any]:
    """One of `CALLS`, which notes each option that is set from now on."""

    @wraps(native)
    def set_option(name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
        before = native(name, value, *args, **kwargs)
        _before.setdefault(name, before)
        _now[name] = value
        return before

    return set_option


def factors() -> Mapping[str, Any]:
    """The options that differ from those that the process began with."""
    return {name: value for name, value in sorted(_now.items()) if value != _before[name]}
