"""Torch's functions, wrapped."""

from __future__ import annotations

import multiprocessing
import os
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from torch._inductor import async_compile

from kcoord.backends.inductor import hooks, scopes
from kcoord.backends.inductor.backend import UNIT
from kcoord.backends.inductor.scopes import Scope


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A process of a job with two ranks on this node, and how often torch's compile workers were started in it."""
    found: list[str] = []
    monkeypatch.setattr(async_compile, "maybe_warm_pool", lambda: found.append("started"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    return found


@pytest.mark.parametrize(
    ("rank", "parent", "cores", "times"),
    [("0", None, 8, 1), ("0", None, 7, 0), (None, None, 8, 0), ("0", object(), 8, 0)],
)
def test_compile_workers_start_with_torch_compile_in_a_rank_that_has_idle_cores(
    monkeypatch: pytest.MonkeyPatch, started: list[str], rank: str | None, parent: object, cores: int, times: int
) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    if rank is None:
        monkeypatch.delenv("RANK")
    hooks._hook_workers()
    assert len(started) == times


@pytest.mark.parametrize(("given", "times"), [({}, 1), ({(UNIT, "key"): []}, 0)], ids=["misses", "finds"])
def test_compile_workers_start_where_a_compile_misses_and_not_where_it_finds(
    monkeypatch: pytest.MonkeyPatch, started: list[str], given: dict[Any, Any], times: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    hooks._hook_workers()
    async_compile.maybe_warm_pool()  # as torch does before it looks anything up
    assert not started
    scope = Scope(UNIT)
    monkeypatch.setattr(scope, "ask", lambda entry: vars(scope).update(given=given, asked=entry))
    monkeypatch.setattr(scopes, "innermost", lambda: scope)
    hooks._looked_up(UNIT, "key", SimpleNamespace(), [])
    assert len(started) == times
