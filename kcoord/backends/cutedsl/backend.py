"""CuTe DSL as a `Backend`. A request is a traced module (MLIR), so its key holds all that tracing has read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.base import Backend
from kcoord.backends.cutedsl.native import NativeCompile
from kcoord.backends.fail_open import fails_open, notices
from kcoord.keys.device import DeviceKey, GPUTarget, Scope
from kcoord.keys.host import host_abi
from kcoord.packs.recipe import Recipe

_COMPILED = "module.mlirbc"
_CUBIN = "cubin-{}.elf"  # the header of each, which names the GPU


@dataclass(frozen=True)
class Traced:
    """A traced module, which a compile or a load turns into the compiled one, in place.

    `name` is that of the host's function. `pipeline` is the passes with all options, and `ir` the text that they read: with
    source lines if these are compiled into the code. `diagnostics` are the arguments by which the caller asks for warnings and
    remarks.
    """

    module: Any = field(repr=False)
    name: str
    ir: str = field(repr=False)
    pipeline: str
    diagnostics: Mapping[str, Any]
    compile: NativeCompile = field(repr=False)


class CuTeDSLBackend(Backend[Traced, Any]):
    """A handle is the caller's own module, of the MLIR context that asks.

    The environment is not in the key: tracing and `Traced.pipeline` hold what CuTe DSL reads of it, and the passes read no more.
    """

    name = "cutedsl"
    modules = ("cutlass.base_dsl.compiler",)  # it imports no torch, which may install kcoord in the middle of an import
    packages = MappingProxyType({"nvidia-cutlass-dsl": (4, 4)})
    recipes = ("cutedsl",)
    scope = Scope.TARGET
    keeps_handles = False  # each belongs to the context of one compile; CuTe DSL keeps what it makes of them

    def hook(self) -> None:
        from kcoord.backends.cutedsl import hooks

        hooks.hook(self)

    def bypass(self, request: Traced) -> str:
        from kcoord.backends.cutedsl import conditions

        reason = conditions.against(request)
        if reason:
            notices.tell(f"{self.label(request)} is compiled by each rank for itself: {reason}", about=reason)
        return reason

    def label(self, request: Traced) -> str:
        return request.name

    def factors(self, request: Traced) -> Mapping[str, Any]:
        from kcoord.backends.cutedsl import release

        return {
            "ir": request.ir,
            "pipeline": request.pipeline,
            "packages": release.packages(),
            "library": release.library(),
            "abi": host_abi(),
        }

    def target(self, request: Traced) -> GPUTarget | None:
        from kcoord.backends.cutedsl import pipelines

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
        from kcoord.backends.cutedsl import mlir

        return mlir.fill(request.module, (artifact.path / _COMPILED).read_bytes())

    def recipe(self, request: Traced, seconds: float) -> Recipe | None:
        from kcoord.backends.cutedsl import recipes

        return recipes.recipe_of(request, self.target(request), seconds)

    def is_portable(self, recipe: Recipe) -> bool:
        return False  # it was traced for this GPU

    def replay(self, recipe: Recipe, target: GPUTarget | None, waits: bool) -> str:
        import cutlass  # noqa: F401 - hooks it

        from kcoord.backends.cutedsl import recipes

        with recipes.request_of(recipe) as request:
            return self.prepare(request, waits)


@fails_open(lambda module: {})
def _files(module: Any) -> Mapping[str, bytes]:
    """The artifact's files, by name. None at all, and then nothing is published, if the module cannot be written."""
    from kcoord.backends.cutedsl import mlir

    content = mlir.bytecode(module)
    headers = {_CUBIN.format(number): header for number, header in enumerate(mlir.cubin_headers(content))}
    return {_COMPILED: content, **headers}
