"""Compiles that are not shared, and what a rank says about those that are shared in vain."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.fx import symbolic_trace  # noqa: E402

from kcoord.backends.inductor import conditions  # noqa: E402
from kcoord.backends.inductor.hooks import _tell_of_devices  # noqa: E402
from kcoord.backends.inductor.request import GRAPH, UNIT  # noqa: E402


def graph_of(function: Any) -> Any:
    return symbolic_trace(function)


@pytest.mark.parametrize(
    ("module", "name", "value"),
    [
        ("torch._inductor.config", "distributed_max_autotune_gemm", True),
        ("torch._inductor.config", "bucket_all_gathers_fx", "all"),
        ("torch._inductor.config", "post_grad_custom_post_pass", print),
        ("torch._functorch.config", "_sync_decision_cross_ranks", True),
    ],
)
def test_settings_under_which_ranks_may_talk_while_they_compile_are_named(
    monkeypatch: pytest.MonkeyPatch, module: str, name: str, value: Any
) -> None:
    import importlib

    plain = graph_of(lambda x: x @ x)
    assert not conditions.problem(UNIT, plain)
    monkeypatch.setattr(importlib.import_module(module), name, value)
    for kind in (UNIT, GRAPH):
        assert f"{module}.{name} is set" in conditions.problem(kind, plain)


def test_every_switch_of_this_torch_that_may_make_ranks_talk_has_been_judged() -> None:
    """A version with another one needs somebody to read what it does, and to list it."""
    import torch._dynamo.config
    import torch._functorch.config
    import torch._inductor.config  # noqa: F401

    numbers = (int, float, type(None))
    found = conditions.unknown_switches(lambda value: isinstance(value, bool) or not isinstance(value, numbers))
    assert list(found) == []


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize(
    ("name", "named"),
    [("_sync_another_decision_cross_ranks", "is on"), ("_sync_cache_decision_cross_ranks", "is set")],
    ids=["of a later one", "of 2.15"],
)
def test_a_switch_of_a_newer_torch_that_is_on_and_may_make_ranks_talk_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, named: str, value: bool
) -> None:
    """That of torch 2.15 is an all_reduce within a decision about its cache."""
    import torch._functorch.config as config
    from torch.utils._config_module import Config

    plain = graph_of(lambda x: x @ x)
    kind = type(next(iter(config._config.values())))
    given = (Config(default=value, value_type=bool), name)[: len(inspect.signature(kind).parameters)]  # torch 2.11: one
    monkeypatch.setitem(config._config, name, kind(*given))
    for kind in (UNIT, GRAPH):
        found = conditions.problem(kind, plain)
        assert (f"torch._functorch.config.{name} {named}" in found) is value
        assert bool(found) is value


def test_a_unit_with_an_operator_of_the_user_is_not_shared_and_its_graphs_are() -> None:
    library = torch.library.Library("kcoord_tests", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    graph = graph_of(lambda x: torch.ops.kcoord_tests.twice(x))
    assert "kcoord_tests.twice" in conditions.problem(UNIT, graph)
    assert not conditions.problem(GRAPH, graph)


class Scaled(torch.Tensor):
    """A tensor of the user: AOTAutograd traces through what it does."""

    @staticmethod
    def __new__(cls, inner: Any) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], context: None, size: Any, stride: Any) -> Scaled:
        return Scaled(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("place", ["an input", "a weight", "between"])
def test_a_unit_with_tensors_of_the_user_is_not_shared(place: str) -> None:
    graph, tensor = graph_of(lambda x: x @ x), Scaled(torch.ones(2))
    assert not conditions.problem(UNIT, graph, [torch.ones(2)])
    if place == "a weight":
        graph.register_buffer("weight", tensor)
    elif place == "between":
        next(iter(graph.graph.nodes)).meta["example_value"] = (tensor,)
    assert "class Scaled" in conditions.problem(UNIT, graph, [tensor] if place == "an input" else ())
    assert not conditions.problem(GRAPH, graph)


@pytest.mark.parametrize(("local", "index", "lines"), [("1", 1, 1), ("0", 0, 0), ("1", 0, 0), ("3", 3, 0)])
def test_one_rank_of_a_node_says_that_the_gpus_index_keeps_ranks_from_sharing(
    monkeypatch: pytest.MonkeyPatch, local: str, index: int, lines: int
) -> None:
    from kcoord.telemetry.events import Notices

    for name, value in (("RANK", local), ("WORLD_SIZE", "4"), ("LOCAL_RANK", local)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("kcoord.backends.inductor.hooks.notices", told := Notices())
    for _ in range(2):
        _tell_of_devices([7, SimpleNamespace(device=SimpleNamespace(index=index))])
    assert len(told.since(0)[0]) == lines


@pytest.mark.parametrize(
    ("arguments", "is_in_the_key"),
    [
        (("cuda", None, False, None), True),
        (("cuda", torch.bfloat16, True, None), True),
        (("cuda", None, True, None), False),
    ],
)
def test_a_graph_may_enter_autocast_if_it_says_to_which_type(arguments: tuple[Any, ...], is_in_the_key: bool) -> None:
    graph = torch.fx.Graph()
    entered = graph.call_function(torch.amp._enter_autocast, arguments)
    left = graph.call_function(torch.amp._exit_autocast, (entered,))
    assert conditions.enters_autocast(entered) is is_in_the_key
    assert conditions.enters_autocast(left)
    assert not conditions.enters_autocast(graph.call_function(torch.sin, (left,)))
