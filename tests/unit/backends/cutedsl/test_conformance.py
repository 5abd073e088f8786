"""CuTe DSL conforms."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest

from kcoord.testing.backends import BackendSuite

pytestmark = pytest.mark.skipif(find_spec("nvidia_cutlass_dsl") is None, reason="needs nvidia-cutlass-dsl")


class TestCuTeDSL(BackendSuite):
    program = Path(__file__).with_name("subject.py")
    error = "CompilerDiagnosticError"
    targets: ClassVar[tuple[Mapping[str, str], ...]] = ({"CUTE_DSL_ARCH": "sm_80"}, {"CUTE_DSL_ARCH": "sm_90a"})
    changes: ClassVar[tuple[str, ...]] = (
        "a global",
        "an attribute of a global object",
        "a closure",
        "a constexpr argument",
        "a helper",
        "the GPU",
        "--opt-level=0",
        "--ptxas-options=-lineinfo",
        "--generate-line-info",
    )

    def environment(self, root: Path) -> Mapping[str, str]:
        return {"CUTE_DSL_ARCH": "sm_90a", "TMPDIR": str(root)}  # there CuTe DSL keeps what is called, not compiled


if find_spec("nvidia_cutlass_dsl") is not None and version("nvidia-cutlass-dsl").startswith(("4.4.", "4.5.")):
    TestCuTeDSL.error = "MLIRError"
