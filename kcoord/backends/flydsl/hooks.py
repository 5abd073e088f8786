"""FlyDSL's pass manager, answered by the backend: below its jit functions, ``flyc.compile`` and its autotuner."""

from __future__ import annotations

from importlib.metadata import version

from kcoord.backends import mlir
from kcoord.backends.flydsl import conditions, llvm_options
from kcoord.backends.flydsl.adapter import backend
from kcoord.backends.reliances import Part

KERNELS = Part("flydsl", "flydsl", "kernels", {
    **mlir.CALLS,
    **llvm_options.CALLS,
    "utils.env:compile.compile_only": "",
    "utils.env:compile.llvm_dir": "",
    "utils.env:runtime.enable_cache": "",
})  # fmt: skip


def hook() -> None:
    """Idempotent."""
    if not KERNELS.holds():
        return
    from flydsl._mlir.passmanager import PassManager
    from flydsl.utils import env

    if tuple(map(int, version("flydsl").split(".")[:2])) < conditions.KEYS_ITS_TRACES:
        conditions.switch_off_own_cache(env)
    for name in llvm_options.CALLS:
        KERNELS.wrap(name, llvm_options.noting)
    mlir.hook(PassManager, backend)
