"""FlyDSL's compiler of traced modules, answered by the backend: below its jit functions, ``flyc.compile`` and its autotuner."""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from typing import TYPE_CHECKING, Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.flydsl import llvm_options, own_cache

if TYPE_CHECKING:
    from kcoord.backends.flydsl.backend import FlyDSLBackend, Traced

_PARAMETERS = ["module", "arch", "func_name", "link_libs"]
_NEEDED = {
    "flydsl.compiler.jit_function": (
        "MlirCompiler.compile", "JitFunction._ensure_sig", "CompilationContext.get_compile_hints",
        "CompilationContext.compile_hints",
    ),
    "flydsl.compiler.backends": ("get_backend", "compile_backend_name", "BaseBackend.pipeline_fragments", "_registry"),
    "flydsl.utils.env": (
        "runtime.enable_cache", "runtime.run_only", "compile.compile_only", "compile.llvm_dir", "debug.enable_debug_info",
    ),
}  # fmt: skip


class _Calling(threading.local):
    """The GPU that the jit function of this thread's last call has fixed."""

    arch = ""


_calling = _Calling()


@fails_open(lambda backend: None)
def hook(backend: FlyDSLBackend) -> None:
    """Idempotent."""
    missing = _missing()
    if missing:
        notices.tell(f"this FlyDSL's {missing} differs: its kernels are compiled by each rank")
        return
    from flydsl.compiler import jit_function
    from flydsl.utils import env

    if hasattr(jit_function.MlirCompiler.compile, "__kcoord_wrapped__"):
        return
    own_cache.switch_off(env)
    llvm_options.watch(sys.modules.get("flydsl._mlir._mlir_libs._mlirDialectsFly"))
    _hook_calls(jit_function.JitFunction)
    _hook_compiles(jit_function.MlirCompiler, backend)


def _missing() -> str:
    """The first name that this release lacks, or that takes other arguments; empty if there is none."""
    for module, names in _NEEDED.items():
        for name in names:
            found: Any = sys.modules.get(module)
            for part in name.split("."):
                try:
                    found = inspect.getattr_static(found, part)
                except AttributeError:
                    return name
    compile = sys.modules["flydsl.compiler.jit_function"].MlirCompiler.compile
    return "" if list(inspect.signature(compile).parameters) == _PARAMETERS else "MlirCompiler.compile"


def _hook_calls(functions: Any) -> None:
    native = functions._ensure_sig

    @functools.wraps(native)
    def ensure_sig(self: Any) -> Any:
        found = native(self)
        _calling.arch = getattr(getattr(self, "_backend_target", None), "arch", "")
        return found

    functions._ensure_sig = ensure_sig


def _hook_compiles(compiler: Any, backend: FlyDSLBackend) -> None:
    native = vars(compiler)["compile"].__func__

    @functools.wraps(native)
    def compile(cls: Any, module: Any, *, arch: str = "", func_name: str = "", link_libs: Any = None) -> Any:
        def natively() -> Any:
            return native(cls, module, arch=arch, func_name=func_name, link_libs=link_libs)

        request = _request(module, arch, func_name, link_libs, natively)
        return natively() if request is None else backend.obtain(request, natively)

    compile.__kcoord_wrapped__ = True  # type: ignore[attr-defined]
    compiler.compile = classmethod(compile)


@fails_open(lambda *arguments: None)
def _request(module: Any, arch: str, function: str, links: Any, natively: Any) -> Traced | None:
    """None if kcoord is off."""
    from flydsl.compiler import backends, jit_function
    from flydsl.utils import env

    from kcoord.backends.flydsl.backend import Traced

    if coordinator_in_use() is None:
        return None
    return Traced(
        module=module,
        ir=str(module.operation.get_asm(enable_debug_info=env.debug.enable_debug_info)),
        arch=arch or backends.get_backend().target.arch,
        function=function,
        links=tuple(map(str, links or ())),
        hints=jit_function.CompilationContext.get_compile_hints(),
        fixed=_calling.arch,
        compile=natively,
    )
