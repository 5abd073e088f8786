"""NineToothed conforms, by ``make``. ``build`` goes the same way."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import pytest

from kcoord.testing.backends import BackendSuite
from tests.unit.backends.ninetoothed import machine

pytestmark = [
    pytest.mark.skipif(bool(machine.why_not()), reason=machine.why_not() or "-"),
    pytest.mark.timeout(900),  # each compile starts several processes that import torch
]


class TestNineToothed(BackendSuite):
    program = Path(__file__).with_name("subject.py")
    error = "CalledProcessError"
    targets = ({"STANDIN_ARCH": "90"}, {"STANDIN_ARCH": "80"})
    changes: ClassVar[tuple[str, ...]] = ("a global", "a helper", "a closure", "arch", "NVCC_APPEND_FLAGS")

    def environment(self, root: Path) -> Mapping[str, str]:
        return machine.make(root)
