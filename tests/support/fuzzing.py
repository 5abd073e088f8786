"""Fuzzing by hypothesis: valid messages and files with some values, or some bytes, altered; and events in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgpack
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

F = TypeVar("F", bound=Callable[..., Any])

USUAL = 100  # examples of a test without a profile
LONG = 20  # times as many


def is_long() -> bool:
    """True with ``--hypothesis-profile=long``, as ``make fuzz`` has it."""
    return settings.default.max_examples > USUAL  # type: ignore[union-attr]


def fuzz(examples: int) -> Callable[[F], F]:
    """Try so many `examples`, or, if it `is_long`, `LONG` times as many."""

    def decorate(test: F) -> F:
        return pytest.mark.fuzz(_tried(examples)(test))  # type: ignore[no-any-return]

    return decorate


def fuzz_machine(machine: type[RuleBasedStateMachine], examples: int, steps: int) -> None:
    """Play so many `examples` of a state machine, of `steps` at most, or `LONG` times as many. Its test has the mark ``fuzz``."""
    run_state_machine_as_test(machine, settings=_tried(examples, stateful_step_count=steps))  # type: ignore[no-untyped-call]


def _tried(examples: int, **more: Any) -> settings:
    checks = [
        HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much,
    ]  # fmt: skip
    return settings(
        max_examples=examples * (LONG if is_long() else 1), deadline=None, suppress_health_check=checks, **more
    )


def nested(depth: int, kind: str = "list") -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value] if kind == "list" else {"": value}
    return value


MOST_NESTED = 1015  # msgpack reads 1024 levels, of which Python cannot print the last
odd = st.sampled_from(
    [
        nested(MOST_NESTED), nested(MOST_NESTED, "dict"), [[]] * 1000, msgpack.ExtType(5, b"x"), msgpack.ExtType(127, b""),
        msgpack.Timestamp(1, 2), "\ud800", "\0", "x" * 100_000, b"\xff", -(2**63), 2**64 - 1, float("nan"), float("inf"),
        True, None, [], {}, "", 0, -1, 1e300,
    ]
)  # fmt: skip


def packed(value: Any) -> bytes:
    return bytes(msgpack.packb(value, unicode_errors="surrogatepass"))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value in it."""
    yield path
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from places(inner, (*path, name))
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            yield from places(inner, (*path, number))


def replaced(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    first, *rest = path
    if isinstance(value, dict):
        return {**value, first: replaced(value[first], tuple(rest), other)}
    return [*value[:first], replaced(value[first], tuple(rest), other), *value[first + 1 :]]


@st.composite
def mutants(draw: st.DrawFn, valid: bytes) -> bytes:
    """`valid` with some bytes changed, left out, put in or cut off."""
    body = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(body) - 1)))
        how = draw(st.sampled_from(["change", "remove", "insert", "cut"]))
        if how == "change" and body:
            body[at] = draw(st.integers(0, 255))
        elif how == "remove":
            del body[at : at + draw(st.integers(1, 4))]
        elif how == "insert":
            body[at:at] = draw(st.binary(min_size=1, max_size=9))
        else:
            del body[at:]
    return bytes(body)


@st.composite
def changed(draw: st.DrawFn, valid: Any) -> bytes:
    """`valid` as msgpack, with one value in it replaced by an odd one, or with some of its bytes changed."""
    how = draw(st.sampled_from(["bytes", "value", "value", "missing"]))
    if how == "bytes":
        return draw(mutants(packed(valid)))
    if how == "missing" and isinstance(valid, dict) and valid:
        missing = draw(st.sampled_from(sorted(valid)))
        return packed({name: value for name, value in valid.items() if name != missing})
    return packed(replaced(valid, draw(st.sampled_from(list(places(valid)))), draw(odd)))
