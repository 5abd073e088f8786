"""The options of CuTe DSL's pipelines by which a compile is shared, or not. Needs no CuTe DSL."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest

from kcoord.backends import mlir
from kcoord.backends.cutedsl import adapter, hooks
from kcoord.backends.mlir import Passes, Traced
from kcoord.keys.device import GPUTarget

PLAIN = "opt-level=3 rdc=false enable-assertions=false preserve-line-info=false enable-iket=false"


def pipeline(more: str, chip: str = "sm_90a") -> str:
    return (
        f"builtin.module(cute-to-nvvm{{cubin-format=bin {PLAIN} {more} cubin-chip={chip}  enable-cuda-dialect=true}})"
    )


def against(more: str, diagnostics: bool = False) -> str:
    adapter.asked.diagnostics = diagnostics
    return adapter.backend.reason_not_shared(Traced(None, "", "", pipeline(more), Passes(print)))


@pytest.mark.parametrize(
    ("more", "chip", "target"),
    [
        ("", "sm_90a", GPUTarget("cuda", "90a", 32)),
        ("cubin-chip='sm_100f'", "sm_100f", GPUTarget("cuda", "100f", 32)),
        ("", "sm_80", GPUTarget("cuda", 80, 32)),
    ],
)
def test_the_target_is_the_chip(more: str, chip: str, target: GPUTarget) -> None:
    assert adapter.backend.target_of(pipeline(more, chip)) == target


def test_passes_of_a_dump_have_no_target() -> None:
    assert adapter.backend.target_of("builtin.module(canonicalize,cse)") is None


@pytest.mark.parametrize("option", ["preserve-line-info", "enable-assertions", "enable-iket"])
def test_source_lines_are_kept_if_the_code_may_name_them(option: str) -> None:
    assert not adapter.backend.keeps_lines(pipeline(""))
    assert adapter.backend.keeps_lines(pipeline("").replace(f"{option}=false", f"{option}=true"))


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
    assert against("", diagnostics=True)
    assert not against("")


def test_the_diagnostics_that_a_caller_asks_for_are_noted_while_its_compile_is_under_way() -> None:
    seen: list[bool] = []
    compile = hooks._noting(lambda *args, **kwargs: seen.append(adapter.asked.diagnostics))
    compile("module", remark_output="remarks.yaml")
    compile("module", collect_compiler_diagnostics=True)
    compile("module", remark_filter=".*", remark_output="", collect_compiler_diagnostics=False)
    assert (seen, adapter.asked.diagnostics) == ([True, True, False], False)


def test_a_pass_manager_that_has_run_is_not_kept_with_its_context() -> None:
    class Manager:
        @staticmethod
        def parse(pipeline: str) -> Manager:
            return Manager()

        def run(self, operation: object) -> None:
            ran.append(operation)

    ran: list[object] = []
    mlir.hook(Manager, adapter.backend)
    manager = Manager.parse(pipeline(""))
    gone = weakref.ref(manager)
    manager.run(SimpleNamespace(name="func.func"))
    del manager
    assert (len(ran), gone()) == (1, None)
