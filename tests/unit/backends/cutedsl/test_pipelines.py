"""The options of CuTe DSL's pipelines by which a compile is shared, or not. Needs no CuTe DSL."""

from __future__ import annotations

from typing import Any

import pytest

from kcoord.backends.cutedsl import mlir
from kcoord.backends.cutedsl.adapter import reason_not_shared
from kcoord.backends.cutedsl.request import NativeCompile, Traced
from kcoord.keys.device import GPUTarget

PLAIN = "opt-level=3 rdc=false enable-assertions=false preserve-line-info=false enable-iket=false"


def pipeline(more: str, chip: str = "sm_90a") -> str:
    return (
        f"builtin.module(cute-to-nvvm{{cubin-format=bin {PLAIN} {more} cubin-chip={chip}  enable-cuda-dialect=true}})"
    )


def against(more: str, **diagnostics: Any) -> str:
    return reason_not_shared(Traced(None, "", "", pipeline(more), diagnostics, NativeCompile(print, {})))


@pytest.mark.parametrize(
    ("more", "chip", "target"),
    [
        ("", "sm_90a", GPUTarget("cuda", "90a", 32)),
        ("cubin-chip='sm_100f'", "sm_100f", GPUTarget("cuda", "100f", 32)),
        ("", "sm_80", GPUTarget("cuda", 80, 32)),
    ],
)
def test_the_target_is_the_chip(more: str, chip: str, target: GPUTarget) -> None:
    assert mlir.target(pipeline(more, chip)) == target


def test_passes_of_a_dump_have_no_target() -> None:
    assert mlir.target("builtin.module(canonicalize,cse)") is None


@pytest.mark.parametrize("option", ["preserve-line-info", "enable-assertions", "enable-iket"])
def test_source_lines_are_kept_if_the_code_may_name_them(option: str) -> None:
    assert not mlir.keeps_lines(pipeline(""))
    assert mlir.keeps_lines(pipeline("").replace(f"{option}=false", f"{option}=true"))


@pytest.mark.parametrize(
    "option",
    [
        "dump-cubin-path='a/b'",
        "dump-ptx-path='a/b'",
        "flatten-locs-output-json-path='a.json'",
        "link-libraries='a.bc'",
        "dump-ir-after-memory-space-opt=true",
    ],
)
def test_compiles_with_files_are_not_shared(option: str) -> None:
    assert against(option)
    assert not against("dump-ir-after-memory-space-opt=false ptx-options='-O2'")


def test_compiles_whose_warnings_are_asked_for_are_not_shared() -> None:
    assert against("", remark_output="remarks.yaml")
    assert against("", collect_compiler_diagnostics=True)
    assert not against("", remark_filter=".*", remark_output="", collect_compiler_diagnostics=False)
