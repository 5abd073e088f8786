"""FlyDSL as a `Backend`. A request is a traced module (MLIR), so its key holds all that tracing has read."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.fail_open import notices
from kcoord.backends.flydsl import conditions, llvm_options
from kcoord.backends.flydsl.request import Traced
from kcoord.keys.device import DeviceKey, GPUTarget, Scope
from kcoord.keys.host import host_abi
from kcoord.keys.packages import Owner, identity_of, owner_of

_COMPILED = "compiled.mlir"
_CODE_OBJECT = "code-object.elf"  # its header, which names the GPU
_ROCM = ("ROCM_PATH", "ROCM_ROOT", "ROCM_HOME")
_DEFAULT = "/opt/rocm"
_HEADER = 64  # bytes of an ELF file
_EMBEDDED = re.compile(r'"(\\7FELF(?:[^"\\]|\\\\|\\[0-9A-F]{2})*)"')
_ESCAPED = re.compile(r"\\(\\|[0-9A-F]{2})")


class FlyDSLBackend(Backend[Traced, Any]):
    """A handle is a compiled module of the MLIR context that asks."""

    name = "flydsl"
    variables = MappingProxyType(
        {
            "FLYDSL_COMPILE_OPT_LEVEL": "how much is optimized",
            "FLYDSL_DEBUG_ENABLE_DEBUG_INFO": "whether the code names source lines",
            "LLVM_GFX1250_ANY_XNACK_CODEGEN": "code for gfx1250 that runs with and without XNACK",
        }
    )
    scope = Scope.TARGET
    keeps_handles = False  # each belongs to the context of one compile; FlyDSL keeps what it makes of them

    def bypass(self, request: Traced) -> str:
        reason = conditions.reason_not_shared(request)
        if reason:
            notices.tell(f"{self.label(request)} is compiled by each rank for itself: {reason}", about=reason)
        return reason

    def label(self, request: Traced) -> str:
        return request.function or "module"

    def factors(self, request: Traced) -> Mapping[str, Any]:
        from flydsl.compiler import backends

        passes = backends.get_backend(arch=request.arch).pipeline_fragments(compile_hints=dict(request.hints))
        return {
            "ir": request.ir,
            "arch": request.arch,
            "target": self.target(request),
            "passes": list(passes),
            "hints": dict(request.hints),
            "options": llvm_options.factors(),
            "package": identity_of("flydsl"),  # `_flydsl_key` leaves its largest library out, and is for the first GPU
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

    def target(self, request: Traced) -> GPUTarget | None:
        return GPUTarget.parse(f"hip:{request.arch}") if request.arch.startswith("gfx") else None

    def device(self, request: Traced) -> DeviceKey | None:
        return None  # a process that only compiles does not open its GPU, and may fork later

    def compile(self, request: Traced, staging: Path) -> Any:
        compiled = request.compile()
        text = str(compiled)
        (staging / _COMPILED).write_text(text, encoding="utf-8")
        if header := _code_object_header(text):
            (staging / _CODE_OBJECT).write_bytes(header)
        return compiled

    def required(self, request: Traced) -> tuple[str, ...]:
        return (_COMPILED,)

    def load(self, request: Traced, artifact: Artifact) -> Any:
        text = (artifact.path / _COMPILED).read_text(encoding="utf-8")
        return type(request.module).parse(text, context=request.module.context)


backend = FlyDSLBackend()


def _rocm() -> Path:
    """ROCm's directory, as MLIR finds it: the first variable that is set, even to nothing."""
    return Path(next((os.environ[name] for name in _ROCM if name in os.environ), _DEFAULT))


def _code_object_header(text: str) -> bytes:
    """The ELF header of the first code object in MLIR's `text`; empty if there is none."""
    found = _EMBEDDED.search(text)
    if found is None:
        return b""
    escaped = found[1][: 3 * _HEADER]
    content = _ESCAPED.sub(lambda each: "\\" if each[1] == "\\" else chr(int(each[1], 16)), escaped)
    return content.encode("latin-1", "replace")[:_HEADER]
