"""Inductor's backend conforms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.forked_suite import ForkedSuite
from tests.support.processes import with_agents_forked
from tests.support.sandbox import WITH_TORCH

pytest.importorskip("torch._inductor")


class TestInductor(ForkedSuite):
    program = Path(__file__).with_name("subject.py")
    error = "InductorError"
    preload = (WITH_TORCH,)
    interrupted = "InductorError"  # torch wraps what a signal's handler raises
    changes = ("a setting",)

    def environment(self, root: Path) -> Mapping[str, str]:
        return (
            with_agents_forked(  # what Inductor reads as it is imported: as in the server (tests/support/with_torch.py)
                {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "1"}
            )
        )
