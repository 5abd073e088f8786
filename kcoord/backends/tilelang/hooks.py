"""TileLang's caches of kernels, answered by the backend: below ``tilelang.compile``, ``tilelang.jit`` and its autotuner."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.tilelang import callbacks, cubins, tuning
from kcoord.backends.tilelang.adapter import backend
from kcoord.backends.tilelang.request import Kernel
from kcoord.backends.wrapping import is_wrapped, wraps
from kcoord.errors import KeyFactorError

_METHODS = {
    "_generate_key": {"func", "out_idx", "execution_backend", "args", "target", "target_host", "pass_configs", "compile_flags"},
    "_load_kernel_from_disk": {"key", "backend_context", "out_idx", "pass_configs", "compile_flags", "func", "verbose"},
    "_build_kernel": {
        "func", "host_kernel_source", "device_kernel_source", "kernel_lib_path", "kernel_params", "backend_context", "out_idx",
        "pass_configs", "compile_flags",
    },
    "_save_kernel_source_code_to_disk": {"kernel", "cache_path", "verbose"},
    "_save_wrapper_kernel_code_to_disk": {"kernel", "cache_path", "verbose"},
    "_save_so_cubin_to_disk": {"kernel", "cache_path", "verbose"},
    "_get_required_files": {"cache_path"},
}  # fmt: skip


class _Key(str):
    """The key that TileLang's cache uses in memory and for its directories, with the request that it was made of."""

    request: Kernel


@fails_open(lambda: None)
def hook() -> None:
    """Idempotent."""
    from tilelang.autotuner.tuner import AutoTuner
    from tilelang.cache.cuda_binary_cache import CUDABinaryCache
    from tilelang.cache.kernel_cache import KernelCache

    if is_wrapped(KernelCache._load_kernel_from_disk):
        return
    differs = next((name for name, known in _METHODS.items() if _parameters(KernelCache, name) != known), None)
    if differs:
        notices.tell(f"this TileLang's {differs} differs: its kernels are compiled by each rank")
        return
    callbacks.watch()
    _hook_kernels(KernelCache)
    cubins.hook(CUDABinaryCache)
    if missing := [name for name in tuning.METHODS if not hasattr(AutoTuner, name)]:
        notices.tell(f"this TileLang's AutoTuner has no {missing[0]}: its choices are made by each rank")
    else:
        tuning.hook(AutoTuner)


def _parameters(cache: Any, name: str) -> set[str]:
    method = getattr(cache, name, None)
    return set(inspect.signature(method).parameters) - {"self"} if method else set()


def _hook_kernels(cache: Any) -> None:
    native_key, native_load = cache._generate_key, cache._load_kernel_from_disk

    @functools.wraps(native_key)
    def generate_key(self: Any, *args: Any, **kwargs: Any) -> str:
        given = inspect.signature(native_key).bind(self, *args, **kwargs).arguments
        return _keyed(given) or native_key(self, *args, **kwargs)

    @wraps(native_load)
    def load(self: Any, key: str, *args: Any, **kwargs: Any) -> Any:
        def native() -> Any:
            return native_load(self, key, *args, **kwargs)

        if not isinstance(key, _Key):
            return native()
        given = inspect.signature(native_load).bind(self, key, *args, **kwargs).arguments
        request = replace(key.request, context=given["backend_context"], verbose=bool(given.get("verbose")))
        return backend.obtain(request, native)

    cache._generate_key, cache._load_kernel_from_disk = generate_key, load


@fails_open(lambda *arguments: None)
def _keyed(given: dict[str, Any]) -> _Key | None:
    """None if kcoord is off, or the kernel is not shared: then TileLang keeps it by its own key."""
    if coordinator_in_use() is None:
        return None
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
        reason = backend.bypass(request)
        key = None if reason else backend.key(request)
    except KeyFactorError as error:
        key, reason = None, str(error)
    if key is None:
        notices.tell(f"{backend.label(request)} is compiled by each rank for itself: {reason}", about=reason)
        return None
    found = _Key(key.digest)
    found.request = replace(request, key=key)
    return found
