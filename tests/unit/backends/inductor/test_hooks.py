"""When torch's functions are wrapped."""

from __future__ import annotations

import multiprocessing

import pytest

pytest.importorskip("torch")

from torch._inductor import async_compile

from kcoord.backends.inductor import hooks


@pytest.mark.parametrize(("rank", "parent", "started"), [("0", None, 1), (None, None, 0), ("0", object(), 0)])
def test_compile_workers_are_started_early_in_a_rank_and_not_in_its_children(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, parent: object, started: int
) -> None:
    calls: list[None] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: calls.append(None))
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    hooks._start_workers()
    assert len(calls) == started
