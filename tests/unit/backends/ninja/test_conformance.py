"""Torch's extensions conform."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.forked_suite import ForkedSuite
from tests.support.processes import with_agents_forked
from tests.support.sandbox import WITH_TORCH

pytest.importorskip("torch.utils.cpp_extension")


class TestNinja(ForkedSuite):
    program = Path(__file__).with_name("subject.py")
    error = "RuntimeError"
    preload = (WITH_TORCH,)
    changes = ("a source", "a header", "a flag", "CPATH")

    def environment(self, root: Path) -> Mapping[str, str]:
        return with_agents_forked({})
