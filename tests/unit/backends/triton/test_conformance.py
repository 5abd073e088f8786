"""Triton's backend conforms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from tests.support import toolchain
from tests.support.forked_suite import ForkedSuite
from tests.support.processes import with_agents_forked
from tests.support.sandbox import WITH_TRITON

pytest.importorskip("triton")


class TestTriton(ForkedSuite):
    program = Path(__file__).with_name("subject.py")
    preload = (WITH_TRITON,)
    error = "CompilationError"
    targets: ClassVar[tuple[Mapping[str, str], ...]] = ({"ARCH": "80"}, {"ARCH": "90"})
    changes = ("line information",)

    def environment(self, root: Path) -> Mapping[str, str]:
        toolchain.share(root / "local")
        fusion = {"TRITON_DEFAULT_FP_FUSION": "1"}  # Triton 3.9 warns without it
        return with_agents_forked({**fusion, "TRITON_HOME": str(root)})  # Triton asks for ~ while it is imported
