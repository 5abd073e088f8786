"""CuTe DSL's trial."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.altered import PASSES, alter, findings

pytestmark = pytest.mark.skipif(find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")


def test_a_trial_passes_and_doctor_names_a_release_with_another_pass_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((state, what, finding),) = findings("cutedsl")
    assert (state, what, finding[:14]) == ("ok", "cutedsl", "a trial passed")
    alter("cutlass._mlir.passmanager", PASSES, tmp_path, monkeypatch)
    failed = "its trial failed: of 1 compiles 0 reached kcoord, and 0 came back"
    assert findings("cutedsl") == [("warn", "cutedsl", failed)]
