"""cuTile's trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.altered import alter, findings
from tests.unit.backends.cutile import IS_INSTALLED

pytestmark = pytest.mark.skipif(not IS_INSTALLED, reason="needs cuda-tile[tileiras]")

RENAMED = """
assemble = compile_cubin
traced = compile_tile.__wrapped__
names = tuple("assemble" if name == "compile_cubin" else name for name in traced.__code__.co_names)
traced.__code__ = traced.__code__.replace(co_names=names)
"""


def test_a_trial_passes_and_doctor_names_a_release_with_another_assembler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((state, what, finding),) = findings("cutile")
    assert (state, what, finding[:14]) == ("ok", "cutile", "a trial passed")
    alter("cuda.tile._compile", RENAMED, tmp_path, monkeypatch)
    failed = "its trial failed: of 1 compiles 0 reached kcoord, and 0 came back"
    assert findings("cutile") == [("warn", "cutile", failed)]
