"""FlyDSL's pass manager, answered by the backend: below its jit functions, ``flyc.compile`` and its autotuner."""

from __future__ import annotations

import sys
from importlib.metadata import version

from kcoord.backends import mlir
from kcoord.backends.flydsl import conditions, llvm_options
from kcoord.backends.flydsl.adapter import backend


def hook() -> None:
    """Idempotent."""
    from flydsl._mlir.passmanager import PassManager
    from flydsl.utils import env

    if tuple(map(int, version("flydsl").split(".")[:2])) < conditions.KEYS_ITS_TRACES:
        conditions.switch_off_own_cache(env)
    llvm_options.watch(sys.modules.get("flydsl._mlir._mlir_libs._mlirDialectsFly"))
    mlir.hook(PassManager, backend)
