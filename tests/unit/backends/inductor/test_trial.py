"""Releases of torch whose compiles pass kcoord by: doctor's trial names them, and a rank tells of it once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.altered import alter, asides, findings
from tests.support.sandbox import Sandbox

pytest.importorskip("torch")
pytest.importorskip("triton")

GRAPHS = "torch._inductor.codecache"
CHANGES = {
    "units": (
        "torch._functorch._aot_autograd.autograd_cache",
        "AOTAutogradCache._lookup = staticmethod(lambda *arguments: None)",
    ),
    "graphs": (GRAPHS, "FxGraphCache._lookup_graph = staticmethod(lambda *arguments: (None, {}))"),
}
"""By what passes by: a module, and its change."""
NOTICE = "it keeps compiles that it has not looked up where kcoord answers: kcoord stands aside from units and graphs"


def test_a_trial_compiles_publishes_and_loads() -> None:
    ((state, what, finding),) = findings("inductor")
    assert (state, what, finding[:14]) == ("ok", "inductor", "a trial passed")


@pytest.mark.parametrize("kind", CHANGES)
def test_compiles_that_pass_by_are_a_finding_of_doctors_and_a_notice_in_each_process(
    kind: str, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter(*CHANGES[kind], tmp_path, monkeypatch)
    if kind == "units":
        ((state, what, finding),) = findings("inductor")
        assert (state, what) == ("warn", "inductor")
        assert finding.startswith("its trial failed: ")
        assert NOTICE in finding
    sandbox.environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    assert asides(sandbox, kind, start=True) == [["inductor", NOTICE]]


def test_doctor_names_a_function_that_is_gone_and_what_its_trial_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter(GRAPHS, "del GuardedCache.find_guarded_entry", tmp_path, monkeypatch)
    (_, _, off), (_, _, failed) = findings("inductor")
    assert off == "units and graphs off: AOTAutogradCache.find_guarded_entry, FxGraphCache.find_guarded_entry differ"
    assert failed.startswith("its trial failed: BackendCompilerFailed: backend='inductor' raised: AttributeError: ")


@pytest.mark.parametrize(
    ("kind", "mode"),
    [*(("units", mode) for mode in ("plain", "off", "problem", "uncached", "warm", "bypassed")), ("graphs", "warm")],
)
def test_compiles_that_kcoord_leaves_alone_or_that_torchs_caches_hold_are_no_alarm(
    sandbox: Sandbox, kind: str, mode: str
) -> None:
    more = {"KCOORD_DISABLE": "1"} if mode == "off" else {}
    more |= {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"} if mode == "uncached" else {}
    if mode == "warm":
        asides(sandbox, kind, KCOORD_DISABLE="1")
    assert asides(sandbox, kind, mode, **more) == []
