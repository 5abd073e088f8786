"""ROCm's files that MLIR reads to make a code object, and the GPU that a code object is for."""

from __future__ import annotations

import os
import re
from pathlib import Path

_VARIABLES = ("ROCM_PATH", "ROCM_ROOT", "ROCM_HOME")
_DEFAULT = "/opt/rocm"
_HEADER = 64  # bytes of an ELF file
_CODE_OBJECT = re.compile(r'"(\\7FELF(?:[^"\\]|\\\\|\\[0-9A-F]{2})*)"')
_ESCAPED = re.compile(r"\\(\\|[0-9A-F]{2})")


def linker() -> Path:
    """The ``ld.lld`` that links code objects."""
    return _root() / "llvm" / "bin" / "ld.lld"


def device_libraries() -> tuple[Path, ...]:
    """The directory of ROCm's mathematical functions, if there is one."""
    directory = _root() / "amdgcn" / "bitcode"
    return (directory,) if directory.is_dir() else ()


def _root() -> Path:
    """As MLIR finds it: the first variable that is set, even to nothing."""
    return Path(next((os.environ[name] for name in _VARIABLES if name in os.environ), _DEFAULT))


def code_object_header(text: str) -> bytes:
    """The ELF header of the first code object in MLIR's `text`; empty if there is none."""
    found = _CODE_OBJECT.search(text)
    if found is None:
        return b""
    escaped = found[1][: 3 * _HEADER]
    content = _ESCAPED.sub(lambda each: "\\" if each[1] == "\\" else chr(int(each[1], 16)), escaped)
    return content.encode("latin-1", "replace")[:_HEADER]
