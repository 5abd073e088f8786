"""TileLang as a `Backend`. A request is a traced kernel (a ``PrimFunc``), so its key holds all that tracing has read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.fail_open import notices
from kcoord.backends.tilelang.conditions import reason_not_shared
from kcoord.backends.tilelang.request import Kernel
from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget, Scope
from kcoord.keys.environment import TOOLCHAIN_VARIABLES
from kcoord.keys.host import host_abi
from kcoord.keys.packages import identity_of

_PACKAGES = ("tilelang", "tvm_ffi", "torch")


class TileLangBackend(Backend[Kernel, Any]):
    """A handle is TileLang's ``JITKernel``; its cache keeps that in memory, by our key."""

    name = "tilelang"
    variables = MappingProxyType(
        {
            **TOOLCHAIN_VARIABLES,
            "TILELANG_ENABLE_DATA_RACE_CHECK": "adds a check to each kernel",
            "TILELANG_ENABLE_IR_SPAN": "whether the IR names the lines that it was made of",
        }
    )
    scope = Scope.TARGET
    keeps_handles = False

    def bypass(self, request: Kernel) -> str:
        return reason_not_shared(request)

    def label(self, request: Kernel) -> str:
        return str((request.function.attrs or {}).get("global_symbol", "kernel"))

    def factors(self, request: Kernel) -> Mapping[str, Any]:
        return {
            "ir": str(request.function.script(show_meta=True)),
            "execution": request.execution,
            "target": str(request.target),
            "host": str(request.host),
            "out_idx": json.dumps(request.out_idx),
            "pass_configs": json.dumps(request.pass_configs, sort_keys=True),
            "flags": json.dumps(request.flags),
            "packages": [identity_of(package) for package in _PACKAGES],
            "abi": host_abi(),
        }

    def tools(self, request: Kernel) -> tuple[str, ...]:
        from tilelang.contrib import cc, nvcc

        found = [cc.get_cc(), cc.get_cplus_compiler()]
        if request.target.kind.name == "cuda":
            try:
                found.append(nvcc.get_nvcc_compiler())
            except RuntimeError as error:  # the compile says so, too
                raise KeyFactorError(str(error)) from None
        return tuple(str(tool) for tool in found if tool)

    def trees(self, request: Kernel) -> tuple[str, ...]:
        """The templates, which people edit, wherever they are; CUTLASS if it is not the package's own."""
        import tilelang
        from tilelang.env import CUTLASS_INCLUDE_DIR, TILELANG_TEMPLATE_PATH

        is_own = Path(CUTLASS_INCLUDE_DIR).resolve().is_relative_to(Path(tilelang.__file__).resolve().parent)
        return (TILELANG_TEMPLATE_PATH,) if is_own else (TILELANG_TEMPLATE_PATH, CUTLASS_INCLUDE_DIR)

    def target(self, request: Kernel) -> GPUTarget | None:
        if request.target.kind.name != "cuda":
            return None
        from tilelang.contrib import nvcc

        return GPUTarget.parse(f"cuda:{nvcc.get_target_arch_and_code(request.target)[0]}")

    def device(self, request: Kernel) -> DeviceKey | None:
        return super().device(request) if self.target(request) else None

    def key(self, request: Kernel) -> CacheKey:
        return request.key or super().key(request)

    def compile(self, request: Kernel, staging: Path) -> Any:
        from tilelang.jit import JITKernel

        kernel = JITKernel(
            request.function,
            out_idx=request.out_idx,
            execution_backend=request.execution,
            target=request.target,
            target_host=request.host,
            verbose=request.verbose,
            pass_configs=request.pass_configs,
            compile_flags=request.flags,
            **({} if request.context is None else {"backend_context": request.context}),
        )
        self._save(request, kernel, staging)
        return kernel

    def _save(self, request: Kernel, kernel: Any, staging: Path) -> None:
        """As in TileLang's own cache, an error costs the files and not the job. None that is required is there in part."""
        cache, place = request.cache, str(staging)
        try:
            cache._save_kernel_source_code_to_disk(kernel, place)
            cache._save_wrapper_kernel_code_to_disk(kernel, place)
            cache._save_so_cubin_to_disk(kernel, place)
            content = _packed(kernel.params)
            cache._safe_write_file(str(staging / cache.params_path), "wb", lambda file: file.write(content))
        except Exception as error:  # noqa: BLE001 - a compiler may raise anything
            let_through(error)
            notices.tell(f"{self.label(request)} is not shared, its files cannot be written: {error}")

    def required(self, request: Kernel) -> tuple[str, ...]:
        files = {
            *request.cache._get_required_files(""),
            request.cache.device_kernel_path,
            request.cache.host_kernel_path,
        }
        return tuple(sorted(files))

    def load(self, request: Kernel, artifact: Artifact) -> Any:
        from tilelang.jit.adapter.base import CachedTextSource

        cache, path = request.cache, artifact.path
        return cache._build_kernel(
            func=request.function,
            host_kernel_source=CachedTextSource(text=(path / cache.host_kernel_path).read_text()),
            device_kernel_source=CachedTextSource(text=(path / cache.device_kernel_path).read_text()),
            kernel_lib_path=str(path / cache.kernel_lib_path),
            kernel_params=_unpacked((path / cache.params_path).read_bytes()),
            **_resolved(request),
            out_idx=request.out_idx,
            pass_configs=request.pass_configs,
            compile_flags=request.flags,
        )


backend = TileLangBackend()


def _resolved(request: Kernel) -> dict[str, Any]:
    """The target and the way of execution, as this release of TileLang hands them on."""
    if request.context is not None:
        return {"backend_context": request.context}
    return {"target": request.target, "target_host": request.host, "execution_backend": request.execution}


def _packed(parameters: Any) -> bytes:
    """The types and sizes of a kernel's parameters, as this release of TileLang keeps them."""
    from tilelang.engine import param

    if hasattr(param, "dump_kernel_params"):
        return str(param.dump_kernel_params(parameters)).encode()
    import cloudpickle

    return bytes(cloudpickle.dumps(parameters))


def _unpacked(content: bytes) -> Any:
    """The content is an artifact's, whose digest and signature were checked."""
    from tilelang.engine import param

    load = getattr(param, "load_kernel_params", None)
    return load(content.decode()) if load else pickle.loads(content)
