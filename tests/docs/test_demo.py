"""The demo tells a user why kcoord was off, if it was."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_for_which_kcoord_was_off_has_its_reason_in_the_place_of_the_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    demo = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "demo", demo)  # where its dataclasses look themselves up
    spec.loader.exec_module(demo)
    monkeypatch.setattr(demo, "HOME", tmp_path)
    why = (
        "kcoord: everybody may replace it: set KCOORD_LOCAL_DIR to a directory of your own; the job runs without kcoord"
    )
    (tmp_path / "kcoord-torchrun-cold.log").write_text(f"step 1\n{why}\n")
    assert demo.report() == f"There is no report: {why}"
