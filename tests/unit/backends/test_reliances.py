"""Releases of compilers that lack what hooks rely on: the part that needs it is left alone, and that is told and counted."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

from kcoord.backends import reliances
from kcoord.backends.reliances import Part, unknown_argument
from tests.support.sandbox import PROGRAMS, Sandbox

PROGRAM = PROGRAMS / "releases.py"
NEEDED_BY = {
    ("inductor", "units and graphs"): (
        "overlap of DDP's buckets",
        "units that another rank compiles",
        "graphs of other GPUs",
    ),
    ("tilelang", "kernels"): ("tuning",),
    ("triton", "kernels"): ("tuning",),
}
"""By part, those that are hooked only with it."""


def answers(box: Sandbox, mode: str) -> tuple[list[dict[str, Any]], str]:
    pytest.importorskip("torch")
    pytest.importorskip("tvm_ffi")
    done = box.run_forked(PROGRAM, mode, timeout=240, WORLD_SIZE="1", RANK="0")
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.timeout(300)
def test_each_name_that_is_missing_takes_off_its_own_part_and_is_told_and_counted(sandbox: Sandbox) -> None:
    (stock, *lacking), said = answers(sandbox, "removed")
    assert (stock["figures"], stock["doctor"]) == ([], [])
    parts = {(compiler, part) for compiler, part, _ in stock["hooked"]}
    assert parts == {(compiler, part) for compiler, part, _ in (found["removed"] for found in lacking)}
    assert len(lacking) > 40
    for found in lacking:
        compiler, part, name = found["removed"]
        path = name.partition(":")[2]
        (aside,) = found["figures"]
        assert (aside["compiler"], aside["part"], aside["ranks"]) == (compiler, part, 1), name
        assert path in aside["why"], name
        assert f"{aside['why']}: kcoord stands aside from {part}, which each rank does for itself" in said
        ((release, told),) = found["doctor"]
        assert (release, told) == (aside["why"].partition(":")[0], f"{part} off: {aside['why'].partition(': ')[2]}")
        lost = [[compiler, each] for each in (part, *NEEDED_BY.get((compiler, part), ()))]
        assert found["hooked"] == [each for each in stock["hooked"] if each[:2] not in lost], name


def test_a_release_whose_functions_take_one_more_parameter_is_hooked_and_gets_it(sandbox: Sandbox) -> None:
    (found,), said = answers(sandbox, "newer")
    assert (found["figures"], found["said"]) == ([], []), said
    assert {name: got for name, got in found["given"].items() if got != [7]} == {}
    assert len(found["given"]) > 12
    assert "e is built by each rank for itself: no key holds its added" in said


class Release:
    """Functions of this module, as a compiler's."""

    def renamed(self, other: int, more: int = 1) -> None:
        pass

    @classmethod
    def moved(cls, second: int, first: int) -> None:
        pass

    def required(self, name: int, added: int) -> None:
        pass

    def only(self, *args: int, name: int) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "call", "holds"),
    [
        ("renamed", "self name", False),
        ("renamed", "self _", True),
        ("renamed", "self other", True),
        ("renamed", "self other more= none=", False),
        ("moved", "cls first second", False),
        ("moved", "cls first= second=", True),
        ("required", "self name", False),
        ("required", "self name ...", True),
        ("only", "self _ _ name=", True),
        ("only", "self _", False),
        ("__init__", "", False),
    ],
)
def test_a_call_fits_a_function_by_what_it_names(
    name: str, call: str, holds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reliances, "coordinator_in_use", lambda: None)
    part = Part("test", "tests", f"{name} {call}", {f"unit.backends.test_reliances:Release.{name}": call})
    assert part.holds() is holds


def test_an_argument_that_no_key_holds_counts_unless_it_is_the_default() -> None:
    def build(name: str, added: int = 0, **more: int) -> None:
        pass

    def of(**arguments: Any) -> str:
        return unknown_argument(inspect.signature(build).bind("name", **arguments), {"name"})

    assert (of(), of(added=0), of(added=1), of(other=0)) == ("", "", "added", "more")
