"""CuTe DSL as a `Backend`. A request is a traced module (MLIR), so its key holds all that tracing has read."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.cutedsl import mlir
from kcoord.backends.cutedsl.request import Traced
from kcoord.backends.fail_open import fails_open, notices
from kcoord.keys.device import DeviceKey, GPUTarget, Scope
from kcoord.keys.host import host_abi
from kcoord.keys.packages import identity_of, recorded

_COMPILED = "module.mlirbc"
_KEEP = "CUTE_DSL_KEEP"
_CUBIN = "cubin-{}.elf"  # the header of each, which names the GPU
_LIBRARY = "cutlass._mlir._mlir_libs._cutlass_ir"
_ROOT = "nvidia_cutlass_dsl"


class CuTeDSLBackend(Backend[Traced, Any]):
    """A handle is the caller's own module, of the MLIR context that asks.

    The environment is not in the key: tracing and `Traced.pipeline` hold what CuTe DSL reads of it, and the passes read no more.
    """

    name = "cutedsl"
    scope = Scope.TARGET
    keeps_handles = False  # each belongs to the context of one compile; CuTe DSL keeps what it makes of them

    def bypass(self, request: Traced) -> str:
        reason = reason_not_shared(request)
        if reason:
            notices.tell(f"{self.label(request)} is compiled by each rank for itself: {reason}", about=reason)
        return reason

    def label(self, request: Traced) -> str:
        return request.name

    def factors(self, request: Traced) -> Mapping[str, Any]:
        return {
            "ir": request.ir,
            "pipeline": request.pipeline,
            "packages": packages(),
            "library": library(),
            "abi": host_abi(),
        }

    def target(self, request: Traced) -> GPUTarget | None:
        return mlir.target(request.pipeline)

    def device(self, request: Traced) -> DeviceKey | None:
        return None  # `pipeline` names the GPU; a process that only compiles does not open its own

    def compile(self, request: Traced, staging: Path) -> Any:
        module = request.compile()
        for name, content in _files(module).items():
            (staging / name).write_bytes(content)
        return module

    def required(self, request: Traced) -> tuple[str, ...]:
        return (_COMPILED,)

    def load(self, request: Traced, artifact: Artifact) -> Any:
        return mlir.fill(request.module, (artifact.path / _COMPILED).read_bytes())


def reason_not_shared(request: Traced) -> str:
    """The reason why `request` must not be shared; empty if it may be."""
    option = mlir.output(request.pipeline)
    if option:
        return f"{option} asks for files of the compile itself"
    if os.environ.get(_KEEP):  # the passes read it, too
        return f"{_KEEP} asks for files of the compile itself"
    if mlir.links(request.pipeline):
        return "it links libraries that its pipeline only names"
    if request.diagnostics.get("remark_output") or request.diagnostics.get("collect_compiler_diagnostics"):
        return "the compiler's remarks and warnings are asked for"
    return ""


@fails_open(lambda module: {})
def _files(module: Any) -> Mapping[str, bytes]:
    """The artifact's files, by name. None at all, and then nothing is published, if the module cannot be written."""
    content = mlir.bytecode(module)
    headers = {_CUBIN.format(number): header for number, header in enumerate(mlir.cubin_headers(content))}
    return {_COMPILED: content, **headers}


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
