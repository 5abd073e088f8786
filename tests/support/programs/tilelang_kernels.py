"""TileLang kernels for this processor. ``tilelang_kernels.py MODE [FACTOR]`` prints one line of JSON."""

from __future__ import annotations

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
from tilelang.contrib import nvcc
from tilelang.jit import JITKernel

from kcoord.rank.choices import Choices
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


def including(code: str) -> Any:
    @T.prim_func
    def included(source: T.Tensor((4,), "float32"), target: T.Tensor((4,), "float32")):  # type: ignore[no-untyped-def]
        with T.Kernel(1) as _:
            T.import_source(code + "\n")
            for i in T.serial(4):
                target[i] = source[i] * T.call_extern("float32", "value")

    return included


locked: list[bool] = []


def watched(native: Any) -> Any:
    def ask(self: Any, *arguments: Any, **keywords: Any) -> Any:
        locked.append(AutoTuner._lock.locked())
        return native(self, *arguments, **keywords)

    return ask


for owner, name in ((Choices, "get"), (Choices, "offer"), (Coordinator, "request")):
    setattr(owner, name, watched(getattr(owner, name)))
error = ""
values: list[float] = []
if mode == "tune":
    AutoTuner._benchmark_target = measure
    kernel = tuned()
elif mode == "unsavable":

    def unsavable(self: Any, *arguments: Any, **keywords: Any) -> Any:
        raise ValueError("cannot be saved")

    KernelCache._save_so_cubin_to_disk = unsavable
    kernel = tilelang.compile(scaled(3), out_idx=[1], **PLACE)
elif mode == "toolless":
    kernel = tilelang.compile(scaled(3), out_idx=[1], **PLACE)
    nvcc.CUDA_HOME = ""
    try:
        tilelang.compile(scaled(4), target={"kind": "cuda", "arch": "sm_90a"}, execution_backend="tvm_ffi")
    except Exception as raised:  # noqa: BLE001 - TVM's, of any class
        error = str(raised)
elif mode == "rewritten":

    def rewritten(code: str, target: Any) -> str:
        return "#include <value.h>\n" + code

    tilelang.engine.register_c_postproc(rewritten)
    kernel = tilelang.compile(scaled(3), out_idx=[1], **PLACE)
elif mode == "includes":
    flags = json.loads(os.environ["FLAGS"])
    for code in json.loads(os.environ["SOURCES"]):
        kernel = tilelang.compile(including(code), out_idx=[1], compile_flags=flags, **PLACE)
        values.append(float(kernel(torch.ones(4))[0]))
else:
    kernel = tilelang.compile(scaled(3), out_idx=[1], **PLACE)
found = {
    "value": float(kernel(torch.ones(4))[0]),
    "compiles": len(compiles),
    "measured": len(measured),
    "locked": any(locked),
    "values": values,
    "error": error,
}
print(json.dumps(found))
