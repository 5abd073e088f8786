"""TileLang conforms, for this processor and for a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import pytest

from kcoord.testing.backends import BackendSuite

pytestmark = pytest.mark.skipif(find_spec("tilelang") is None, reason="needs tilelang")


class TestForTheProcessor(BackendSuite):
    program = Path(__file__).with_name("subject.py")
    error = "RuntimeError"
    changes: ClassVar[tuple[str, ...]] = ("a global", "a template")

    def environment(self, root: Path) -> Mapping[str, str]:
        """A copy of the templates, which a row edits."""
        found = find_spec("tilelang")
        assert found is not None
        assert found.origin is not None
        shutil.copytree(Path(found.origin).with_name("src"), root / "templates")
        return {"TEMPLATES": str(root / "templates"), "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
class TestForAGPU(TestForTheProcessor):
    interrupted = "RuntimeError"  # TVM's own, which quotes the other
    targets = ({"ARCH": "sm_80"}, {"ARCH": "sm_90a"})
    changes = (*TestForTheProcessor.changes, "NVCC_APPEND_FLAGS")

    def environment(self, root: Path) -> Mapping[str, str]:
        return {**super().environment(root), "FOR": "cuda"}
