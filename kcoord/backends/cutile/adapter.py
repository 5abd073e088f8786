"""cuTile as a `Backend`. A request is a file of Tile IR bytecode, so its key holds all that tracing has read."""

from __future__ import annotations

import functools
import io
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.fail_open import fails_open, notices
from kcoord.keys.device import DeviceKey, GPUTarget, Scope
from kcoord.keys.packages import identity_of, recorded

_CUBIN = "kernel.cubin"
_REMARKS = "remarks.yaml"
_AT_RANDOM = 8  # characters that `tempfile` puts after the kernel's name


@dataclass(frozen=True)
class Bytecode:
    """A file of bytecode, and how it is to be assembled: cuTile's own arguments.

    `remarks` is the file that the compiler's remarks are asked for in; a failure to write it is none of the kernel's. `other`
    is an argument that no key holds; empty if there is none.
    """

    file: Path
    options: Any
    sm: str
    features: tuple[str, ...]
    libraries: tuple[Path, ...]
    is_for_debugger: bool
    remarks: Path | None
    other: str
    assemble: Callable[[], Path] = field(repr=False)


class CuTileBackend(Backend[Bytecode, Path]):
    """A handle is the file that cuTile reads, beside its bytecode."""

    name = "cutile"
    scope = Scope.TARGET
    keeps_handles = False  # cuTile keeps what it loads

    def bypass(self, request: Bytecode) -> str:
        reason = f"no key holds its {request.other}" if request.other else ""
        if reason:
            notices.tell(f"{self.label(request)} is compiled by each rank for itself: {reason}", about=reason)
        return reason

    def label(self, request: Bytecode) -> str:
        return request.file.stem[:-_AT_RANDOM] or request.file.stem

    def factors(self, request: Bytecode) -> Mapping[str, Any]:
        """The bytecode names source lines, which the code names, too."""
        return {
            "bytecode": request.file.read_bytes(),
            "options": repr(request.options),
            "sm": request.sm,
            "features": request.features,
            "libraries": [library.read_bytes() for library in request.libraries],
            "debugger": request.is_for_debugger,
            "package": package(),
        }

    def tools(self, request: Bytecode) -> tuple[str, ...]:
        from cuda.tile import _compile

        return (_compile._find_compiler_bin().path,)

    def target(self, request: Bytecode) -> GPUTarget | None:
        try:
            return GPUTarget.parse(f"cuda:{request.sm.removeprefix('sm_')}")
        except ValueError:
            return None

    def device(self, request: Bytecode) -> DeviceKey | None:
        return None  # `sm` names the GPU; a process that only compiles does not open its own

    def compile(self, request: Bytecode, staging: Path) -> Path:
        cubin = request.assemble()
        _copy(cubin, request.remarks, staging)
        return cubin

    def required(self, request: Bytecode) -> tuple[str, ...]:
        return (_CUBIN,)

    def load(self, request: Bytecode, artifact: Artifact) -> Path:
        if request.remarks is not None and (artifact.path / _REMARKS).is_file():
            shutil.copyfile(artifact.path / _REMARKS, request.remarks)
        return Path(shutil.copyfile(artifact.path / _CUBIN, request.file.with_suffix(".cubin")))

    def trial(self) -> int:
        import cuda.tile as ct
        from cuda.tile import compilation
        from cuda.tile._cext import default_tile_context

        def nothing():  # type: ignore[no-untyped-def]
            pass

        default_tile_context.config.cache_dir = None  # that cache is asked before the hook
        convention = compilation.CallingConvention.cutile_python_v1()
        signature = compilation.KernelSignature([], calling_convention=convention)
        compilation.export_kernel(
            ct.kernel(nothing), [signature], io.BytesIO(), gpu_code="sm_89", output_format="cubin"
        )
        return 1


@fails_open(lambda *arguments: None)
def _copy(cubin: Path, remarks: Path | None, staging: Path) -> None:
    """After an error nothing is published, and this rank has its kernel."""
    if remarks is not None and remarks.is_file():
        shutil.copyfile(remarks, staging / _REMARKS)
    shutil.copyfile(cubin, staging / _CUBIN)


@functools.lru_cache(maxsize=1)
def package() -> str:
    """The installed cuda-tile, which shares the module ``cuda`` with other distributions; its files if it has no record."""
    site = Path(str(sys.modules["cuda.tile"].__file__)).parents[2]
    return recorded(site, "cuda-tile") or identity_of("cuda")


backend = CuTileBackend()
