"""What a lead collects, and when those who wait are let go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from torch._dynamo.exc import RestartAnalysis

from kcoord.backends.inductor import compiles, hooks
from kcoord.backends.inductor.compiles import OpenCompile
from kcoord.backends.inductor.request import GRAPH, UNIT, Entry
from kcoord.keys.cache_key import CacheKey


class _Compilation:
    """As far as a scope knows one."""

    def __init__(self) -> None:
        self.key = CacheKey.of("inductor", "unit")
        self.ended = ""

    def refuse_sharing(self, why: str) -> None:
        self.ended = f"withheld: {why}"

    def raised(self, error: BaseException) -> None:
        self.ended = f"raised: {error}"

    def give_up(self) -> None:
        self.ended = self.ended or "given up"


def leading(kind: str) -> tuple[OpenCompile, Any]:
    compilation: Any = _Compilation()
    return OpenCompile(kind, asked=Entry(kind, "asked"), compilation=compilation), compilation


def test_a_lead_collects_what_torch_writes_and_nobody_else_does() -> None:
    unit, compilation = leading(UNIT)
    other = OpenCompile(UNIT)
    with other, unit:
        compiles.record(GRAPH, "forward", b"1")
        compiles.record("pgo", "frame", {"not": "bytes"})
        compilation.ended = "ended"
    assert unit.made == {(GRAPH, "forward"): b"1"}
    assert not other.made
    compiles.record(GRAPH, "later", b"2")
    assert unit.made == {(GRAPH, "forward"): b"1"}


def test_a_graph_that_torch_does_not_cache_lets_those_go_who_wait_for_its_unit() -> None:
    unit, compilation = leading(UNIT)
    with unit:
        hooks._keyed(lambda graph: ((graph, []), {}), "graph")
        assert not compilation.ended
        hooks._keyed(lambda graph: (None, {"cache_bypass_reason": "it is frozen"}), "graph")
        assert "it is frozen" in compilation.ended
        assert compiles.leading() is None


@pytest.mark.parametrize(
    ("error", "how"), [(NotImplementedError("no such operator"), "raised"), (RestartAnalysis(), "withheld")]
)
def test_a_compile_that_torch_begins_anew_is_no_failure(error: Exception, how: str) -> None:
    unit, compilation = leading(UNIT)
    with pytest.raises(type(error)), unit:
        raise error
    assert compilation.ended.startswith(how)
    assert compiles.innermost() is None


def test_a_lead_that_cannot_be_published_for_a_fault_of_ours_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise ValueError("a fault")

    monkeypatch.setattr(compiles.backend, "finish", broken)
    monkeypatch.setattr(compiles, "write_entries", broken)
    unit, compilation = leading(UNIT)
    compilation.staging = Path("/nowhere")
    with unit:
        compiles.record(UNIT, "asked", b"1")
    assert compilation.ended == "given up"
