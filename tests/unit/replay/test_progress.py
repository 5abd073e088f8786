"""The progress of a warm-up."""

from __future__ import annotations

import sys

import pytest

from kcoord.replay.warmup import printed
from tests.support.sandbox import PROGRAMS, Sandbox


def test_a_line_now_and_then_without_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    often, seldom = printed("warm-up \x1b[2J", every=0.0), printed("warm-up", every=1000.0)
    for done in (1, 2):
        often(done, 3)
        seldom(done, 3)
    assert capsys.readouterr().err == "".join(f"kcoord: warm-up \ufffd[2J: {done} of 3 keys\n" for done in (1, 2))


def test_a_function_of_ones_own_is_told_instead(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.local))
    monkeypatch.syspath_prepend(str(PROGRAMS))
    import kcoord

    profiled = __import__("profiled")
    told: list[tuple[int, int]] = []
    kcoord.warmup([(profiled.make, (n,)) for n in range(3)], progress=lambda done, every: told.append((done, every)))
    assert told == [(1, 3), (2, 3), (3, 3)]
    sys.modules.pop("profiled")
