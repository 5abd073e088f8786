"""FlyDSL as a `Backend`, by its pass manager."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kcoord.backends.flydsl import conditions, llvm_options
from kcoord.backends.mlir import MLIRBackend, Traced
from kcoord.keys.device import GPUTarget
from kcoord.keys.host import host_abi
from kcoord.keys.packages import Owner, identity_of, owner_of

_ROCM = ("ROCM_PATH", "ROCM_ROOT", "ROCM_HOME")
_DEFAULT = "/opt/rocm"
_TRIED = "rocdl-attach-target{chip=gfx942},gpu-module-to-binary{format=fatbin}"
_CHIP = re.compile(r"\brocdl-attach-target\{[^}]*\bchip=(\w+)")


class FlyDSLBackend(MLIRBackend):
    name = "flydsl"
    variables = MappingProxyType(
        {
            "FLYDSL_COMPILE_OPT_LEVEL": "how much is optimized",
            "FLYDSL_DEBUG_ENABLE_DEBUG_INFO": "whether the code names source lines",
            "LLVM_GFX1250_ANY_XNACK_CODEGEN": "code for gfx1250 that runs with and without XNACK",
        }
    )

    def makes_code(self, pipeline: str) -> bool:
        return _attaches(pipeline) or _emits(pipeline)

    def keeps_lines(self, pipeline: str) -> bool:
        return "ensure-debug-info-scope-on-llvm-func" in pipeline

    def target_of(self, pipeline: str) -> GPUTarget | None:
        found = _CHIP.search(pipeline)
        return GPUTarget.parse(f"hip:{found[1]}") if found and found[1].startswith("gfx") else None

    def reason_not_shared(self, request: Traced) -> str:
        if conditions.links(request.pipeline):
            return "it links libraries that its trace only names"
        if reason := conditions.of_user():
            return reason
        is_whole = _attaches(request.pipeline) and _emits(request.pipeline)
        return "" if is_whole else "its passes are run one by one"

    def factors(self, request: Traced) -> Mapping[str, Any]:
        return {
            "ir": request.ir,
            "target": self.target(request),
            "pipeline": request.pipeline,
            "options": llvm_options.factors(),
            "package": identity_of("flydsl"),
            "abi": host_abi(),
        }

    def tools(self, request: Traced) -> tuple[str, ...]:
        """The linker of code objects."""
        return (str(_rocm() / "llvm" / "bin" / "ld.lld"),)

    def trees(self, request: Traced) -> tuple[str, ...]:
        """ROCm's mathematical functions, if they are there; FlyDSL itself if it is a checkout."""
        import flydsl

        libraries = _rocm() / "amdgcn" / "bitcode"
        found = (libraries,) if libraries.is_dir() else ()
        checkout = (Path(flydsl.__file__).parent,) if owner_of("flydsl") is Owner.PROJECT else ()
        return tuple(map(str, (*found, *checkout)))

    def trial(self) -> int:
        """Passes over a module without kernels, which needs no ROCm."""
        from flydsl._mlir import ir, passmanager

        with ir.Context():
            module = ir.Module.parse("func.func @nothing() { return }")
            passmanager.PassManager.parse(f"builtin.module({_TRIED})").run(module.operation)
        return 1


backend = FlyDSLBackend()


def _attaches(pipeline: str) -> bool:
    return "rocdl-attach-target{" in pipeline


def _emits(pipeline: str) -> bool:
    return "gpu-module-to-binary{format=fatbin" in pipeline


def _rocm() -> Path:
    """ROCm's directory, as MLIR finds it: the first variable that is set, even to nothing."""
    return Path(next((os.environ[name] for name in _ROCM if name in os.environ), _DEFAULT))
