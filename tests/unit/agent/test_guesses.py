"""Guesses of what a new job compiles: what most other jobs compiled of the modules that it has imported."""

from __future__ import annotations

from kcoord.agent import guesses
from kcoord.agent.guesses import guessed, modules_of
from kcoord.packs.recipe import Recipe


def recipe(name: str, width: int = 0, module: str = "kernels", target: str = "cuda:90") -> Recipe:
    return Recipe("triton", module, name, {"width": width}, target, 1.0, 0)


def names(recipes: list[Recipe]) -> list[str]:
    return [f"{each.qualname}{each.call['width']}" for each in recipes]


def test_modules_are_listed_once() -> None:
    assert modules_of([[recipe("f"), recipe("g")], [recipe("h", module="other")]]) == ["kernels", "other"]


def test_what_most_jobs_compiled_comes_first_then_what_was_compiled_last() -> None:
    latest, before, long_ago = [recipe("f", 1)], [recipe("f", 2), recipe("f", 3)], [recipe("f", 3), recipe("f", 4)]
    assert names(guessed([latest, before, long_ago], {"kernels"}, "cuda:90")) == ["f3", "f1", "f2", "f4"]


def test_only_imported_modules_and_the_jobs_own_gpu_count() -> None:
    others = [recipe("f", module="other"), recipe("g", target="cuda:80"), recipe("h", target="")]
    assert guessed([others], {"kernels"}, "cuda:90") == []


def test_a_few_of_each_kernel_are_guessed() -> None:
    many = [recipe(name, width) for name in "fg" for width in range(20)]
    assert names(guessed([many], {"kernels"}, "cuda:90")) == [f"{name}{width}" for name in "fg" for width in range(8)]
    kinds = [recipe(f"f{number}") for number in range(1000)]
    assert len(guessed([kinds], {"kernels"}, "cuda:90")) == guesses._MOST
