"""A request for a traced module of CuTe DSL, and CuTe DSL's own compile of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
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


@dataclass(frozen=True)
class Traced:
    """A traced module, which a compile or a load turns into the compiled one, in place.

    `name` is that of the host's function. `pipeline` is the passes with all options, and `ir` the text that they read: with
    source lines if these are compiled into the code. `diagnostics` are the arguments by which the caller asks for warnings and
    remarks.
    """

    module: Any = field(repr=False)
    name: str
    ir: str = field(repr=False)
    pipeline: str
    diagnostics: Mapping[str, Any]
    compile: NativeCompile = field(repr=False)
