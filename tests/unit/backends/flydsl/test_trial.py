"""FlyDSL's trial."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.altered import PASSES, alter, findings

pytestmark = pytest.mark.skipif(find_spec("flydsl") is None, reason="needs flydsl")


def test_a_trial_passes_and_doctor_names_a_release_with_another_pass_manager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ((state, what, finding),) = findings("flydsl")
    assert (state, what, finding[:14]) == ("ok", "flydsl", "a trial passed")
    alter("flydsl._mlir.passmanager", PASSES, tmp_path, monkeypatch)
    failed = "its trial failed: of 1 compiles 0 reached kcoord, and 0 came back"
    assert findings("flydsl") == [("warn", "flydsl", failed)]
