"""FlyDSL's compiler of traced modules, answered by the backend: below its jit functions, ``flyc.compile`` and its autotuner."""

from __future__ import annotations

import sys
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.flydsl import conditions, llvm_options
from kcoord.backends.flydsl.adapter import backend
from kcoord.backends.flydsl.request import Traced
from kcoord.backends.wrapping import differing, is_wrapped, wraps

_NEEDED = dict.fromkeys((
    "compiler.jit_function:CompilationContext.get_compile_hints", "compiler.backends:get_backend",
    "compiler.backends:compile_backend_name", "compiler.backends:BaseBackend.pipeline_fragments",
    "compiler.backends:_registry", "utils.env:runtime.enable_cache", "utils.env:compile.compile_only",
    "utils.env:compile.llvm_dir", "utils.env:debug.enable_debug_info",
), "") | {"compiler.jit_function:MlirCompiler.compile": "cls module arch func_name link_libs"}  # fmt: skip
"""The names that are used, and the parameters of the function that is replaced."""


@fails_open(lambda: None)
def hook() -> None:
    """Idempotent."""
    if name := differing("flydsl", _NEEDED):
        notices.tell(f"this FlyDSL's {name.partition(':')[2]} differs: its kernels are compiled by each rank")
        return
    from flydsl.compiler import jit_function
    from flydsl.utils import env

    if is_wrapped(jit_function.MlirCompiler.compile):
        return
    conditions.switch_off_own_cache(env)
    llvm_options.watch(sys.modules.get("flydsl._mlir._mlir_libs._mlirDialectsFly"))
    _hook_compiles(jit_function.MlirCompiler)


def _hook_compiles(compiler: Any) -> None:
    native = vars(compiler)["compile"].__func__

    @wraps(native)
    def compile(cls: Any, module: Any, *, arch: str = "", func_name: str = "", link_libs: Any = None) -> Any:
        def natively() -> Any:
            return native(cls, module, arch=arch, func_name=func_name, link_libs=link_libs)

        request = _request(module, arch, func_name, link_libs, natively)
        return natively() if request is None else backend.obtain(request, natively)

    compiler.compile = classmethod(compile)


@fails_open(lambda *arguments: None)
def _request(module: Any, arch: str, function: str, links: Any, natively: Any) -> Traced | None:
    """None if kcoord is off."""
    from flydsl.compiler import backends, jit_function
    from flydsl.utils import env

    if coordinator_in_use() is None:
        return None
    return Traced(
        module=module,
        ir=str(module.operation.get_asm(enable_debug_info=env.debug.enable_debug_info)),
        arch=arch or backends.get_backend().target.arch,
        function=function,
        links=tuple(map(str, links or ())),
        hints=jit_function.CompilationContext.get_compile_hints(),
        compile=natively,
    )
