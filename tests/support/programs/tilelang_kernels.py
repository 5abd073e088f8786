"""TileLang kernels for this processor. ``tilelang_kernels.py MODE [FACTOR]`` prints one line of JSON."""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any

os.environ["TILELANG_PRINT_ON_COMPILATION"] = "0"

import tilelang
import tilelang.language as T
import torch
from tilelang.autotuner import AutoTuner
from tilelang.cache.kernel_cache import KernelCache
from tilelang.jit import JITKernel

from kcoord.rank.coordinator import Coordinator

mode, factor = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2
compiles: list[int] = []
measured: list[int] = []
if mode == "late":
    tilelang.engine.register_c_postproc(lambda code, target: code)
if mode != "launched":
    import kcoord

    kcoord.install()
PLACE = {"target": "c", "execution_backend": "cython"}


def counted(native: Any) -> Any:
    def compile(*arguments: Any, **keywords: Any) -> Any:
        compiles.append(1)
        return native(*arguments, **keywords)

    return compile


JITKernel._compile_and_create_adapter = counted(JITKernel._compile_and_create_adapter)


def helper() -> int:
    return factor


def scaled(by: int) -> Any:
    @T.prim_func
    def scale(source: T.Tensor((4,), "float32"), target: T.Tensor((4,), "float32")):  # type: ignore[no-untyped-def]
        with T.Kernel(1) as _:
            for i in T.serial(4):
                target[i] = source[i] * T.float32(by)

    return scale


def measure(self: Any, jit_kernel: Any, *arguments: Any, **keywords: Any) -> tuple[float, None]:
    """The preference of this process: FACTOR's last digit says which of the configurations is fast."""
    measured.append(1)
    value = float(jit_kernel(torch.ones(4))[0])
    return (1.0 if value == helper() * int(os.environ["FAST"]) else 2.0), None


@tilelang.autotune(configs=[{"block": 1}, {"block": 2}])
@tilelang.jit(out_idx=[1], **PLACE)
def tuned(block: int = 1) -> Any:
    @T.prim_func
    def scale(source: T.Tensor((4,), "float32"), target: T.Tensor((4,), "float32")):  # type: ignore[no-untyped-def]
        with T.Kernel(1) as _:
            for i in T.serial(4):
                target[i] = source[i] * T.float32(helper() * block)

    return scale


locked: list[bool] = []
native_choice = Coordinator.choice


def choice(self: Any, *arguments: Any) -> Any:
    locked.append(AutoTuner._lock.locked())
    return native_choice(self, *arguments)


Coordinator.choice = choice  # type: ignore[method-assign]
if mode == "tune":
    AutoTuner._benchmark_target = measure
    kernel = tuned()
elif mode == "unsavable":

    def unsavable(self: Any, *arguments: Any, **keywords: Any) -> Any:
        raise ValueError("cannot be saved")

    KernelCache._save_so_cubin_to_disk = unsavable
    kernel = tilelang.compile(scaled(3), out_idx=[1], **PLACE)
elif mode == "includes":

    @T.prim_func
    def included(source: T.Tensor((4,), "float32"), target: T.Tensor((4,), "float32")):  # type: ignore[no-untyped-def]
        with T.Kernel(1) as _:
            T.import_source('#include "value.h"\n')
            for i in T.serial(4):
                target[i] = source[i] * T.call_extern("float32", "value")

    kernel = tilelang.compile(included, out_idx=[1], compile_flags=json.loads(os.environ["FLAGS"]), **PLACE)
elif mode == "unloadable":

    def unloadable(self: Any, *arguments: Any, **keywords: Any) -> Any:
        raise OSError(errno.ESTALE, "a server has forgotten the file")

    KernelCache._build_kernel = unloadable
    kernel = tilelang.compile(scaled(3), out_idx=[1], **PLACE)
else:
    kernel = tilelang.compile(scaled(3), out_idx=[1], **PLACE)
found = {
    "value": float(kernel(torch.ones(4))[0]),
    "compiles": len(compiles),
    "measured": len(measured),
    "locked": any(locked),
}
print(json.dumps(found))
