"""cuTile conforms."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import pytest

from kcoord.testing.backends import BackendSuite
from tests.unit.backends.cutile import IS_INSTALLED

pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="needs cuda-tile[tileiras]")


class TestCuTile(BackendSuite):
    program = Path(__file__).with_name("subject.py")
    error = "CompilerExecutionError"
    targets: ClassVar[tuple[Mapping[str, str], ...]] = ({"SM": "sm_80"}, {"SM": "sm_100"})
    changes: ClassVar[tuple[str, ...]] = (
        "a global",
        "a closure",
        "a constant argument",
        "a helper",
        "the GPU",
        "the debugger",
        "the level of optimization",
    )

    def environment(self, root: Path) -> Mapping[str, str]:
        return {"SM": "sm_89", "CUDA_TILE_CACHE_DIR": "0"}


if IS_INSTALLED and version("cuda-tile").startswith(("1.3.", "1.4.", "1.5.")):
    TestCuTile.error = "TileCompilerExecutionError"
if IS_INSTALLED and version("cuda-tile").startswith("1.3."):
    TestCuTile.changes = tuple(each for each in TestCuTile.changes if each != "the debugger")  # it has none
