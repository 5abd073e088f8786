"""CuTe DSL as a `Backend`. A request is a traced module (MLIR), so its key holds all that tracing has read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.cutedsl import mlir, pipelines, release
from kcoord.backends.cutedsl.request import Traced
from kcoord.backends.fail_open import fails_open, notices
from kcoord.keys.device import DeviceKey, GPUTarget, Scope
from kcoord.keys.host import host_abi

_COMPILED = "module.mlirbc"
_KEEP = "CUTE_DSL_KEEP"
_CUBIN = "cubin-{}.elf"  # the header of each, which names the GPU


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
            "packages": release.packages(),
            "library": release.library(),
            "abi": host_abi(),
        }

    def target(self, request: Traced) -> GPUTarget | None:
        return pipelines.target(request.pipeline)

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
    option = pipelines.output(request.pipeline)
    if option:
        return f"{option} asks for files of the compile itself"
    if os.environ.get(_KEEP):  # the passes read it, too
        return f"{_KEEP} asks for files of the compile itself"
    if pipelines.links(request.pipeline):
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


backend = CuTeDSLBackend()
