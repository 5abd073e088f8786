"""FlyDSL's pass manager, answered by the backend: below its jit functions, ``flyc.compile`` and its autotuner."""

from __future__ import annotations

import sys
from importlib.metadata import version

from kcoord.backends import mlir
from kcoord.backends.flydsl import conditions, llvm_options
from kcoord.backends.flydsl.adapter import backend
from kcoord.backends.reliances import Part

KERNELS = Part(
    "flydsl",
    "flydsl",
    "kernels",
    {
        **mlir.CALLS,
        **dict.fromkeys(
            ("utils.env:runtime.enable_cache", "utils.env:compile.llvm_dir", "utils.env:compile.compile_only"), ""
        ),
    },
)


def hook() -> None:
    """Idempotent."""
    if not KERNELS.holds():
        return
    from flydsl._mlir.passmanager import PassManager
    from flydsl.utils import env

    if tuple(map(int, version("flydsl").split(".")[:2])) < conditions.KEYS_ITS_TRACES:
        conditions.switch_off_own_cache(env)
    llvm_options.watch(sys.modules.get("flydsl._mlir._mlir_libs._mlirDialectsFly"))
    mlir.hook(PassManager, backend)
