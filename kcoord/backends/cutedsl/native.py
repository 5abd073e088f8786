"""CuTe DSL's own compile of one module."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

AFTERWARDS = "_post_compile_hook"


class NativeCompile:
    """Runs the passes, which change the module in place, and so at most once.

    `Compiler.compile` then calls the compiler's hook for compiled modules, which adds functions for TVM FFI that only the
    caller's process can describe. It is left out here.
    """

    def __init__(self, compile: Callable[..., Any], given: Mapping[str, Any]) -> None:
        """`given` are the arguments of `compile`, by name, with ``self``."""
        self._compile, self._given = compile, given
        self.is_done = False

    def __call__(self) -> Any:
        if not self.is_done:
            compiler = copy.copy(self._given["self"])
            setattr(compiler, AFTERWARDS, None)
            self._compile(**{**self._given, "self": compiler})
            self.is_done = True
        return self._given["module"]
