"""The installed release of CuTe DSL. Its distributions share one directory, and none of them is called ``cutlass``."""

from __future__ import annotations

import functools
import hashlib
import sys
from pathlib import Path

from kcoord.keys.packages import identity_of

_LIBRARY = "cutlass._mlir._mlir_libs._cutlass_ir"
_ROOT = "nvidia_cutlass_dsl"


@functools.lru_cache(maxsize=1)
def packages() -> tuple[str, ...]:
    """``name-version hash`` of each distribution beside the ``cutlass`` that is imported; one of its files if it has none.

    The hash is of RECORD, without files that differ between installations of one wheel.
    """
    file = Path(str(sys.modules["cutlass"].__file__))
    site = next((parent.parent for parent in file.parents if parent.name == _ROOT), None)
    found = site.glob(f"{_ROOT}*.dist-info") if site is not None else ()
    return tuple(_identity(each) for each in sorted(found)) or (identity_of("cutlass"),)


def _identity(info: Path) -> str:
    record = info / "RECORD"
    lines = record.read_text(encoding="utf-8").splitlines() if record.is_file() else []
    recorded = sorted(
        line for line in lines if ",sha256=" in line and ".dist-info/" not in line and ".pyc," not in line
    )
    digest = hashlib.sha256("\n".join(recorded).encode()).hexdigest()[:16]
    return f"{info.name.removesuffix('.dist-info')} {digest}"


@functools.lru_cache(maxsize=1)
def library() -> str:
    """``name size`` of the compiler that this process has loaded.

    A release has one for each CUDA. They lie side by side, or, before 4.6, the one that was installed last replaces the other.
    """
    file = Path(str(sys.modules[_LIBRARY].__file__))
    return f"{file.name} {file.stat().st_size}"
