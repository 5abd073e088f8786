"""TileLang's caches of kernels, answered by the backend: below ``tilelang.compile``, ``tilelang.jit`` and its autotuner."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.reliances import Part, unknown_argument
from kcoord.backends.tilelang import conditions, tuning
from kcoord.backends.tilelang.adapter import backend
from kcoord.backends.tilelang.request import Kernel
from kcoord.backends.wrapping import is_wrapped, wraps
from kcoord.errors import KeyFactorError

_BINARIES = {
    "cache.cuda_binary_cache:CUDABinaryCache.load": "cls key compile_format",
    "cache.cuda_binary_cache:CUDABinaryCache.save": "cls key compile_format data",
}
_HAS_CONTEXT = "tilelang.backend.module" in sys.modules  # since 0.1.14, by its cache, which is imported before this
_RESOLVED = "backend_context=" if _HAS_CONTEXT else "target= target_host= execution_backend="
_CACHE, _TUNER = "cache.kernel_cache:KernelCache", "autotuner.tuner:AutoTuner"
KERNELS = Part("tilelang", "tilelang", "kernels", {
    **_BINARIES,
    f"{_CACHE}._build_kernel": "self func= host_kernel_source= device_kernel_source= kernel_lib_path= kernel_params="
    f" {_RESOLVED} out_idx= pass_configs= compile_flags=",
    f"{_CACHE}._generate_key": "self func= out_idx= execution_backend= target= pass_configs= ...",
    f"{_CACHE}._get_required_files": "self _",
    f"{_CACHE}._load_kernel_from_disk": f"self key {_RESOLVED} ...",
    f"{_CACHE}._safe_write_file": "",
    f"{_CACHE}._save_kernel_source_code_to_disk": "self _ _",
    f"{_CACHE}._save_so_cubin_to_disk": "self _ _",
    f"{_CACHE}._save_wrapper_kernel_code_to_disk": "self _ _",
    **{f"{_CACHE}.{name}_path": "" for name in ("device_kernel", "host_kernel", "kernel_lib", "params")},
    "contrib.cc:get_cc": "", "contrib.cc:get_cplus_compiler": "",
    "contrib.nvcc:get_nvcc_compiler": "", "contrib.nvcc:get_target_arch_and_code": "_",
    "env:CUDA_HOME": "", "env:CUTLASS_INCLUDE_DIR": "", "env:TILELANG_TEMPLATE_PATH": "",
    "jit:JITKernel.__init__": "self _ out_idx= execution_backend= target= target_host= verbose= pass_configs= compile_flags="
    + _HAS_CONTEXT * " backend_context=",
    "jit.adapter.base:CachedTextSource": "text=",
})  # fmt: skip
CALLBACKS = Part("tilelang", "tvm_ffi", "kernels", conditions.CALLS)
TUNING = Part("tilelang", "tilelang", "tuning", {
    **{
        f"{_TUNER}.{name}": "self ..."
        for name in ("generate_cache_key", "_load_result_from_disk", "run", "_ensure_jit_functions")
    },
    f"{_TUNER}._memory_cache": "",
    "autotuner.param:AutotuneResult": "latency= config= ref_latency= libcode= func= kernel=",
    "env:env.is_autotune_cache_disabled": "", "env:env.is_cache_enabled": "",
    "jit:JITKernel.get_kernel_source": "self", "jit:JITKernel.update_tuner_result": "self latency= config= ref_latency=",
})  # fmt: skip


class _Key(str):
    """The key that TileLang's cache uses in memory and for its directories, with the request that it was made of."""

    request: Kernel


def hook() -> None:
    """Idempotent."""
    if not (KERNELS.holds() and CALLBACKS.holds()):
        return
    from tilelang.autotuner.tuner import AutoTuner
    from tilelang.cache.kernel_cache import KernelCache

    if is_wrapped(KernelCache._load_kernel_from_disk):
        return
    CALLBACKS.wrap(next(iter(CALLBACKS.calls)), conditions.noting_callbacks)
    _hook_kernels(KernelCache)
    for name in _BINARIES:
        KERNELS.wrap(name, _unless_shared)
    if TUNING.holds():
        tuning.hook(AutoTuner)


def _hook_kernels(cache: Any) -> None:
    native_key, native_load = cache._generate_key, cache._load_kernel_from_disk

    @functools.wraps(native_key)
    def generate_key(self: Any, *args: Any, **kwargs: Any) -> str:
        given = inspect.signature(native_key).bind(self, *args, **kwargs)
        return _keyed(given) or native_key(self, *args, **kwargs)

    @wraps(native_load)
    def load(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        def native() -> Any:
            return native_load(self, key, *args, **kwargs)

        if not isinstance(key, _Key):
            return native()
        given = inspect.signature(native_load).bind(self, key, *args, **kwargs).arguments
        request = replace(key.request, context=given.get("backend_context"), verbose=bool(given.get("verbose")))
        return backend.obtain(request, native)

    cache._generate_key, cache._load_kernel_from_disk = generate_key, load


def _unless_shared(native: Any) -> Callable[..., Any]:
    """For TileLang's cache of nvcc's output. Its key holds neither compilers nor templates."""

    @wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        return native(*args, **kwargs) if coordinator_in_use() is None else None

    return call


@fails_open(lambda *arguments: None)
def _keyed(bound: inspect.BoundArguments) -> _Key | None:
    """None if kcoord is off, or the kernel is not shared: then TileLang keeps it by its own key."""
    if coordinator_in_use() is None:
        return None
    given = bound.arguments
    request = Kernel(
        cache=given["self"],
        function=given["func"],
        execution=given["execution_backend"],
        target=given["target"],
        host=given.get("target_host"),
        out_idx=given["out_idx"],
        pass_configs=given["pass_configs"],
        flags=given.get("compile_flags"),
    )
    try:
        other = unknown_argument(
            bound, {*KERNELS.parameters(f"{_CACHE}._generate_key"), "args", "target_host", "compile_flags"}
        )
        reason = f"no key holds its {other}" if other else backend.bypass(request)
        key = None if reason else backend.key(request)
    except KeyFactorError as error:
        key, reason = None, str(error)
    if key is None:
        notices.tell(f"{backend.label(request)} is compiled by each rank for itself: {reason}", about=reason)
        return None
    found = _Key(key.digest)
    found.request = replace(request, key=key)
    return found
