"""The environment in a key: what changes code, read live, and nothing else."""

from __future__ import annotations

import collections
import os
from collections.abc import Callable
from importlib import import_module
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.backends.registry import compilers
from kcoord.keys import CacheKey
from kcoord.keys.environment import Environment, variables

FLAG = "PTXAS_OPTIONS"


@pytest.fixture(autouse=True)
def _no_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (FLAG, "OTHER"):
        monkeypatch.delenv(name, raising=False)


_CHANGES: list[Callable[[], object]] = [
    lambda: os.environ.__setitem__(FLAG, "-O1"),
    lambda: os.environ.update({FLAG: "-O1"}),
    lambda: os.environ.update(PTXAS_OPTIONS="-O1", OTHER="1"),
    lambda: os.environ.setdefault(FLAG, "-O1"),
    lambda: os.environ.__ior__({FLAG: "-O1"}),
    lambda: os.environb.__setitem__(FLAG.encode(), b"-O1"),
]


@pytest.mark.parametrize("change", _CHANGES)
def test_a_change_by_any_way_moves_the_token_and_its_end_moves_it_back(change: Callable[[], object]) -> None:
    environment = Environment([FLAG])
    before = environment.token()
    with mock.patch.dict(os.environ):
        change()
        assert environment.read() == {FLAG: "-O1"}
        assert environment.token() != before
    assert environment.token() == before


_NAMES = st.sampled_from(["A", "B", "C"])
_STEPS = st.lists(st.tuples(_NAMES, st.none() | st.sampled_from(["", "0", "1"])), max_size=20)


@settings(max_examples=200, deadline=None)
@given(_STEPS)
def test_two_looks_are_equal_exactly_when_the_variables_are(steps: list[tuple[str, str | None]]) -> None:
    environment = Environment(["A", "B"])
    seen: dict[bytes, dict[str, str]] = {}
    with mock.patch.dict(os.environ):
        for name in "ABC":
            os.environ.pop(name, None)
        for name, value in steps:
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
            now = {n: os.environ[n] for n in ("A", "B") if n in os.environ}
            token = environment.token()
            assert variables(token) == now
            assert seen.setdefault(token, now) == now
    assert len({tuple(sorted(s.items())) for s in seen.values()}) == len(seen)


class StandIn(collections.UserDict[str, str]):
    """A mapping that is no `os._Environ`; its `_data` must not be taken for one's."""

    _data = {b"PTXAS_OPTIONS": b"wrong"}  # noqa: RUF012 - not a field


@pytest.mark.parametrize("make", [dict, StandIn], ids=["a dict", "a mapping with _data"])
def test_a_stand_in_for_os_environ_is_read_by_its_public_interface(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[dict[str, str]], dict[str, str]]
) -> None:
    environment = Environment([FLAG])
    plain = environment.token()
    other = make({FLAG: "-O1"})
    with monkeypatch.context() as context:
        context.setattr(os, "environ", other)
        assert environment.read() == {FLAG: "-O1"}
        other[FLAG] = "-O2"
        assert environment.read() == {FLAG: "-O2"}
        stood_in = environment.token()
    assert environment.token() == plain
    with mock.patch.dict(os.environ, {FLAG: "-O2"}):
        assert environment.token() == stood_in, "both ways of reading say the same"


def test_without_cpythons_bytes_the_public_interface_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment([FLAG])

    class Other(dict[bytes, bytes]):
        pass

    with mock.patch.dict(os.environ, {FLAG: "-O1"}), monkeypatch.context() as context:
        context.setattr(os.environ, "_data", Other(os.environ._data))  # type: ignore[attr-defined]
        assert environment.read() == {FLAG: "-O1"}
        os.environ[FLAG] = "-O2"
        assert environment.read() == {FLAG: "-O2"}


def test_a_difference_reads_as_a_variable_that_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = Environment([FLAG, "CFLAGS"])
    before = CacheKey.of("b", "n", env=environment.read())
    monkeypatch.setenv("CFLAGS", "-O1")
    after = CacheKey.of("b", "n", env=environment.read())
    assert [str(d) for d in before.diff(after)] == ["env CFLAGS: unset → -O1"]
    assert before.digest != after.digest


def test_every_variable_has_a_reason_and_no_list_holds_a_path_that_a_tool_is_keyed_by() -> None:
    pytest.importorskip("triton")
    adapters = [
        import_module(compiler.backend.partition(":")[0]).backend for compiler in compilers() if compiler.backend
    ]
    tables = {backend.name: backend.variables for backend in adapters if backend.variables}
    assert {"triton", "ninja", "tilelang"} <= tables.keys()
    for name, table in tables.items():
        assert all(table.values())
        # FlyDSL runs no compiler of CUDA
        assert name == "flydsl" or table.keys() >= {"NVCC_APPEND_FLAGS", "NVCC_PREPEND_FLAGS"}
        assert not table.keys() & {"PATH", "TRITON_PTXAS_PATH", "TRITON_LIBDEVICE_PATH", "TRITON_CACHE_DIR", "RANK"}
