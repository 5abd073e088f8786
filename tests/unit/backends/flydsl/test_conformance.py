"""FlyDSL conforms."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import pytest

from kcoord.testing.backends import BackendSuite
from tests.unit.backends.flydsl import rocm

pytestmark = pytest.mark.skipif(bool(rocm.why_not()), reason=rocm.why_not() or "-")


class TestFlyDSL(BackendSuite):
    program = Path(__file__).with_name("subject.py")
    error = interrupted = "DSLCompileError"  # FlyDSL wraps whatever its pass manager raises
    targets = ({"ARCH": "gfx942"}, {"ARCH": "gfx950"})
    changes: ClassVar[tuple[str, ...]] = (
        "an attribute of a global object",
        "a list in a closure",
        "a helper elsewhere",
        "ARCH",
    )

    def environment(self, root: Path) -> Mapping[str, str]:
        here = {"ROCM_PATH": str(rocm.make(root)), "ARCH": "gfx942", "COMPILE_ONLY": "1"}
        return here | rocm.OWN_CACHE_OFF


if not rocm.why_not() and version("flydsl") == "0.2.0":
    TestFlyDSL.error = TestFlyDSL.interrupted = "FlyDSLCompileError"
