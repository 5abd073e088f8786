"""LLVM's options that the script has set in this process: ``with flydsl.compiler.llvm_options.llvm_options(...)``.

They change code, and LLVM does not list them: they are noted as they are set.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

_SETTERS = ("set_llvm_option_bool", "set_llvm_option_int", "set_llvm_option_str")
_before: dict[str, Any] = {}
_now: dict[str, Any] = {}


def watch(library: Any) -> None:
    """Note each option that is set from now on. `library` is FlyDSL's, in C++."""
    for name in _SETTERS:
        if hasattr(library, name):
            setattr(library, name, _noting(getattr(library, name)))


def _noting(native: Any) -> Any:
    @functools.wraps(native)
    def set_option(name: str, value: Any) -> Any:
        before = native(name, value)
        _before.setdefault(name, before)
        _now[name] = value
        return before

    return set_option


def factors() -> Mapping[str, Any]:
    """The options that differ from those that the process began with."""
    return {name: value for name, value in sorted(_now.items()) if value != _before[name]}
