"""Releases of Triton whose kernels pass kcoord by: doctor's trial names them, and a rank tells of it once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.altered import alter, asides, findings
from tests.support.sandbox import Sandbox

pytest.importorskip("torch")
pytest.importorskip("triton")

ANOTHER_CACHE = """
from triton.runtime.cache import FileCacheManager, _base32
get_cache_manager = lambda key: FileCacheManager(_base32(key))
"""
ANOTHER_METHOD = """
from triton.runtime.cache import FileCacheManager
FileCacheManager.get_files = FileCacheManager.get_group
names = tuple(name.replace("get_group", "get_files") for name in compile.__code__.co_names)
compile.__code__ = compile.__code__.replace(co_names=names)
"""
NOTICE = "it stores kernels that it has not asked kcoord's cache manager for: kcoord stands aside from kernels"


def test_a_trial_compiles_publishes_and_loads() -> None:
    ((state, what, finding),) = findings("triton")
    assert (state, what, finding[:14]) == ("ok", "triton", "a trial passed")


@pytest.mark.parametrize("code", [ANOTHER_CACHE, ANOTHER_METHOD], ids=["another cache", "another method"])
def test_kernels_that_pass_by_are_a_finding_of_doctors_and_a_notice_in_each_process(
    code: str, sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter("triton.compiler.compiler", code, tmp_path, monkeypatch)
    if code is ANOTHER_CACHE:
        ((state, what, finding),) = findings("triton")
        assert (state, what) == ("warn", "triton")
        assert finding.startswith("its trial failed: ")
        assert NOTICE in finding
    sandbox.environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
    assert asides(sandbox, "kernels", start=True) == [["triton", NOTICE]]


def test_doctor_names_a_function_that_is_gone_and_what_its_trial_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter("triton.runtime.cache", "del FileCacheManager.put_group, CacheManager.put_group", tmp_path, monkeypatch)
    (_, _, off), *_ = findings("triton")
    assert off == "kernels off: FileCacheManager.put_group differs"


@pytest.mark.parametrize(
    "mode", ["off", "always", "override", "dump", "warm", "setting", "variable", "under way", "fault"]
)
def test_kernels_that_kcoord_leaves_alone_or_that_a_cache_holds_are_no_alarm(sandbox: Sandbox, mode: str) -> None:
    more: dict[str, str] = {
        "always": {"TRITON_ALWAYS_COMPILE": "1"},
        "override": {"TRITON_KERNEL_OVERRIDE": "1", "TRITON_OVERRIDE_DIR": str(sandbox.root)},
        "dump": {"TRITON_KERNEL_DUMP": "1", "TRITON_DUMP_DIR": str(sandbox.root / "dump")},
        "off": {"KCOORD_DISABLE": "1"},
    }.get(mode, {})
    if mode == "warm":
        asides(sandbox, "kernels", KCOORD_DISABLE="1")
        asides(sandbox, "kernels")
    assert asides(sandbox, "kernels", mode, **more) == []
