"""The registry: compilers are found by name, and none is imported."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kcoord.backends import registry
from kcoord.backends.base import Backend
from kcoord.backends.fail_open import notices
from kcoord.backends.registry import place_of
from kcoord.keys.cache_key import CacheKey
from tests.support.sandbox import Sandbox


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Registers entry points, in place of those that are installed."""

    def register(**entries: str) -> None:
        found = [EntryPoint(name, value, registry.GROUP) for name, value in entries.items()]
        monkeypatch.setattr(registry, "entry_points", lambda group: found)
        registry.backends.cache_clear()

    monkeypatch.setattr(notices, "_told", {})
    yield register
    registry.backends.cache_clear()


class Other(Backend[Any, Any]):
    name = "other"
    recipes = ("other",)

    def label(self, request: Any) -> str:
        return "kernel"

    def load(self, request: Any, artifact: Any) -> Any:
        return artifact


BUILT_IN = list(registry._BUILT_IN)


def test_a_backend_of_another_package_is_one_of_them(registered: Any) -> None:
    registered(other=f"{__name__}:Other")
    assert [backend.name for backend in registry.backends()] == [*BUILT_IN, "other"]
    assert type(registry.replayer("other")) is Other


@pytest.mark.parametrize(
    "value", ["no_such_module:Backend", f"{__name__}:Nothing", f"{__name__}:pytest", f"{__name__}:Other"]
)
def test_a_broken_one_is_named_once_and_left_alone(registered: Any, value: str) -> None:
    registered(broken=value)  # Other has another name
    for _ in range(2):
        assert [backend.name for backend in registry.backends()] == BUILT_IN
        registry.backends.cache_clear()
        registry._made.cache_clear()
    (line,) = notices.since(0)[0]
    assert "'broken' is left alone" in line


def test_a_built_in_one_is_not_replaced(registered: Any) -> None:
    registered(triton=f"{__name__}:Other", python=f"{__name__}:Other")
    assert [backend.name for backend in registry.backends()] == BUILT_IN


def test_recipes_find_their_backend_by_kind() -> None:
    found = {kind: registry.replayer(kind) for kind in ("triton", "python", "unknown")}
    assert {kind: backend and backend.name for kind, backend in found.items()} == {
        "triton": "triton", "python": "python", "unknown": None,
    }  # fmt: skip


def test_installing_imports_no_compiler(sandbox: Sandbox) -> None:
    program = "import sys, kcoord; print(kcoord.install()); print([n for n in ('triton', 'torch') if n in sys.modules])"
    assert sandbox.run("-c", program).stdout == f"{BUILT_IN}\n[]\n"


def test_a_triton_kernels_place_is_that_of_the_key_that_its_digest_holds() -> None:
    own = "A" * 52
    key = CacheKey.of("triton", "kernel", triton_key=own)
    assert place_of(key) == f"triton/{own}"
    factor = replace(key.factors[0], text="B" * 52)
    assert place_of(replace(key, factors=(factor,))) == f"objects/{key.digest[:2]}/{key.digest}"


def test_the_place_of_an_artifact_without_a_layout_of_its_own_is_named_by_its_digest() -> None:
    key = CacheKey.of("python", "kernel", n=1)
    assert place_of(key) == f"objects/{key.digest[:2]}/{key.digest}"
