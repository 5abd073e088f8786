"""The wrapped entry point of a compiler, around a hedge's compile that another rank has overtaken."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kcoord.backends import abandoned_frames
from kcoord.rank.compilation import Overtaken


def hedge(ends: list[BaseException]) -> Any:
    """A compilation whose artifact lies at its home already."""
    return SimpleNamespace(overtaken=True, key=SimpleNamespace(name="kernel"), raised=ends.append)


def test_a_compile_that_is_overtaken_begins_anew_once_and_then_goes_on_to_its_end() -> None:
    """What landed may not load here: a rank that began anew each time would never get its kernel."""
    begun, ends = [], []

    def compile() -> str:
        compilation = hedge(ends)
        begun.append(compilation)
        abandoned_frames.register(compilation, sys._getframe())
        try:
            abandoned_frames.end_if_overtaken(compilation)
            return "compiled"
        finally:
            if len(begun) == 2:
                abandoned_frames.unregister(compilation)

    assert abandoned_frames.wrap(compile)() == "compiled"
    assert len(begun) == 2
    assert [type(end) for end in ends] == [Overtaken]


def test_a_compile_that_another_one_begins_may_be_overtaken_all_the_same() -> None:
    ends: list[BaseException] = []
    inner_begun, outer_begun = [], []

    def inner() -> str:
        compilation = hedge(ends)
        inner_begun.append(compilation)
        if len(inner_begun) > 1:
            return "inner"
        abandoned_frames.register(compilation, sys._getframe())
        abandoned_frames.end_if_overtaken(compilation)
        raise AssertionError("it is overtaken")

    def outer() -> str:
        outer_begun.append(1)
        if len(outer_begun) == 1:
            raise Overtaken("another rank")
        return abandoned_frames.wrap(inner)() + " of outer"  # type: ignore[no-any-return]

    assert abandoned_frames.wrap(outer)() == "inner of outer"
    assert len(inner_begun) == 2


def test_an_error_of_the_compiler_is_its_own() -> None:
    def compile() -> None:
        raise ValueError("no such layout")

    with pytest.raises(ValueError, match="no such layout"):
        abandoned_frames.wrap(compile)()
