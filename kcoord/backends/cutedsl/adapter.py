"""CuTe DSL as a `Backend`, by its pass manager.

A pipeline is ``builtin.module(cute-to-nvvm{opt-level=3 cubin-chip=sm_90a …})``.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcoord.backends.mlir import MLIRBackend, Traced
from kcoord.keys.device import GPUTarget
from kcoord.keys.host import host_abi
from kcoord.keys.packages import identity_of, recorded

_KEEP = "CUTE_DSL_KEEP"
_LIBRARY = "cutlass._mlir._mlir_libs._cutlass_ir"
_ROOT = "nvidia_cutlass_dsl"
_CHIP = re.compile(r"\bcubin-chip='?sm_(\w+)")
_WITH_LINES = re.compile(r"\b(?:preserve-line-info|enable-assertions|enable-iket)(?:=true)?(?=[\s}])")
_WITH_FILES = re.compile(r"\b((?:dump|print)-[\w-]+|flatten-locs-output-json-path)(?!=false)(?==|[\s}])")


class _Asked(threading.local):
    """`diagnostics`: the caller of the compile under way asks for warnings and remarks, which only a compile gives."""

    diagnostics = False


asked = _Asked()


class CuTeDSLBackend(MLIRBackend):
    """The environment is not in the key: tracing and the pipeline hold what CuTe DSL reads of it, and the passes read no more."""

    name = "cutedsl"

    def makes_code(self, pipeline: str) -> bool:
        return self.target_of(pipeline) is not None

    def keeps_lines(self, pipeline: str) -> bool:
        """True for line tables, and the messages of assertions before 4.6."""
        return _WITH_LINES.search(pipeline) is not None

    def target_of(self, pipeline: str) -> GPUTarget | None:
        chips = _CHIP.findall(pipeline)
        try:
            return GPUTarget.parse(f"cuda:{chips[-1]}") if chips else None
        except ValueError:
            return None

    def reason_not_shared(self, request: Traced) -> str:
        option = _WITH_FILES.search(request.pipeline)
        if option:
            return f"{option[1]} asks for files of the compile itself"
        if os.environ.get(_KEEP):  # the passes read it, too
            return f"{_KEEP} asks for files of the compile itself"
        if "link-libraries=" in request.pipeline:
            return "it links libraries that its pipeline only names"
        return "the compiler's remarks and warnings are asked for" if asked.diagnostics else ""

    def factors(self, request: Traced) -> Mapping[str, Any]:
        return {
            "ir": request.ir,
            "pipeline": request.pipeline,
            "packages": packages(),
            "library": library(),
            "abi": host_abi(),
        }

    def trial(self) -> int:
        from cutlass import cute

        @cute.jit
        def nothing():  # type: ignore[no-untyped-def]
            pass

        cute.compile(nothing, no_jit_engine=True, options="--gpu-arch=sm_90a")
        return 1


@functools.lru_cache(maxsize=1)
def packages() -> tuple[str, ...]:
    """``name version hash`` of each distribution of the ``cutlass`` that is imported; its files if it has none.

    They share a directory, and none of them is called ``cutlass``.
    """
    file = Path(str(sys.modules["cutlass"].__file__))
    site = next((parent.parent for parent in file.parents if parent.name == _ROOT), None)
    names = sorted(each.name.partition("-")[0] for each in site.glob(f"{_ROOT}*.dist-info")) if site is not None else []
    return tuple(f"{name} {recorded(site, name)}" for name in names if site) or (identity_of("cutlass"),)


@functools.lru_cache(maxsize=1)
def library() -> str:
    """``name size`` of the compiler that this process has loaded.

    A release has one for each CUDA. They lie side by side, or, before 4.6, the one that was installed last replaces the other.
    """
    file = Path(str(sys.modules[_LIBRARY].__file__))
    return f"{file.name} {file.stat().st_size}"


backend = CuTeDSLBackend()
