"""CuTe DSL's pass pipeline, answered by the backend: below ``cute.compile``, which asks no cache, and calls of jit functions."""

from __future__ import annotations

import inspect
import sys
from typing import Any

from kcoord.backends.cutedsl import mlir
from kcoord.backends.cutedsl.adapter import backend
from kcoord.backends.cutedsl.request import AFTERWARDS, NativeCompile, Traced
from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.wrapping import is_wrapped, wraps
from kcoord.interruption import let_through

_NEEDED = {"self", "module", "pipeline"}
_DIAGNOSTICS = {"remark_filter", "warnings_filter", "remark_output", "collect_compiler_diagnostics"}
_LONGEST_NAME = 80  # characters; CuTe DSL's names list the types of all arguments
_WITHOUT_EFFECT = {"arch", "cuda_toolkit", "enable_debug_info", "enable_verifier"}  # on code: for messages and checks


@fails_open(lambda: None)
def hook() -> None:
    """Idempotent."""
    compiler: Any = getattr(sys.modules["cutlass.base_dsl.compiler"], "Compiler", None)
    native = getattr(compiler, "compile", None)
    if is_wrapped(native):
        return
    if native is None or not _is_known(native):
        notices.tell("this CuTe DSL's Compiler.compile differs: its kernels are compiled by each rank")
        return
    signature = inspect.signature(native)

    @wraps(native)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        request = _request(signature, native, self, args, kwargs)
        if request is None:
            return native(self, *args, **kwargs)
        _obtain(request)
        if getattr(self, AFTERWARDS):
            getattr(self, AFTERWARDS)(request.module)
        return request.module

    compiler.compile = compile


def _is_known(native: Any) -> bool:
    found = set(inspect.signature(native).parameters)
    code = getattr(inspect.unwrap(native), "__code__", None)
    return (
        found >= _NEEDED
        and found <= _NEEDED | _DIAGNOSTICS | _WITHOUT_EFFECT
        and code is not None
        and AFTERWARDS in code.co_names
    )


def _obtain(request: Traced) -> None:
    try:
        backend.obtain(request, request.compile)
    except OSError as error:
        let_through(error)
        if not request.compile.is_done:
            raise
        # the disk refused the artifact: this rank has its module


@fails_open(lambda *arguments: None)
def _request(signature: Any, native: Any, compiler: Any, args: Any, kwargs: Any) -> Traced | None:
    """None if kcoord is off, or if these passes make no GPU code: those of a dump."""
    if coordinator_in_use() is None:
        return None
    given = signature.bind(compiler, *args, **kwargs).arguments
    module, pipeline = given["module"], given["pipeline"]
    if mlir.target(pipeline) is None:
        return None
    return Traced(
        module=module,
        name=mlir.symbol(module)[:_LONGEST_NAME],
        ir=mlir.text(module, mlir.keeps_lines(pipeline)),
        pipeline=pipeline,
        diagnostics={name: given[name] for name in _DIAGNOSTICS & given.keys()},
        compile=NativeCompile(native, given),
    )
