"""CuTe DSL's pass manager, answered by the backend: below ``cute.compile``, which asks no cache, and calls of jit functions.

CuTe DSL then adds the functions for TVM FFI to the module, by what only the caller's process knows.
"""

from __future__ import annotations

import sys
from typing import Any

from kcoord.backends import mlir
from kcoord.backends.cutedsl.adapter import asked, backend
from kcoord.backends.reliances import Part
from kcoord.backends.wrapping import is_wrapped, wraps

KERNELS = Part("cutedsl", "cutlass", "kernels", {**mlir.CALLS, "base_dsl.compiler:Compiler.compile": ""})
_DIAGNOSTICS = ("remark_output", "collect_compiler_diagnostics")


def hook() -> None:
    """Idempotent."""
    if not KERNELS.holds():
        return
    from cutlass._mlir.passmanager import PassManager

    compiler: Any = sys.modules["cutlass.base_dsl.compiler"].Compiler
    if not is_wrapped(compiler.compile):
        compiler.compile = _noting(compiler.compile)
    mlir.hook(PassManager, backend)


def _noting(native: Any) -> Any:
    @wraps(native)
    def compile(*args: Any, **kwargs: Any) -> Any:
        before, asked.diagnostics = asked.diagnostics, any(kwargs.get(name) for name in _DIAGNOSTICS)
        try:
            return native(*args, **kwargs)
        finally:
            asked.diagnostics = before

    return compile
