"""How a row of the generic API is compiled: by kcoord, by a cache that forgets what code depends on, or by no cache at all.

Which it is says the environment variable STALE_MODE: ``raise`` or ``rekey`` (kcoord, by what it does about drift),
``naive``, or ``oracle``.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kcoord
from kcoord.keys.device import GPUTarget
from tests.stale.generic_functions import ROWS as FUNCTIONS
from tests.stale.generic_surroundings import ROWS as SURROUNDINGS
from tests.stale.generic_values import ROWS as VALUES

ROWS = [*VALUES, *FUNCTIONS, *SURROUNDINGS]


def compile_once(**choices: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    mode = os.environ["STALE_MODE"]
    if mode == "oracle":
        return _uncached
    if mode == "naive":
        return _naive
    return kcoord.compile_once(**{"scope": kcoord.Scope.TARGET, "on_drift": mode, **choices})


def _uncached(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any) -> Any:
        staging = Path(tempfile.mkdtemp())
        function(*args, staging=staging)
        return types.SimpleNamespace(path=staging)

    return call


def _naive(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keyed by what a first version of any cache is keyed by: the function's own code and its plain arguments."""
    compile = _uncached(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        plain = [hash(a) for a in args if isinstance(a, (int, float))]  # as a dict sees them: 1 is 1.0
        key = hashlib.sha256(function.__code__.co_code + repr(plain).encode()).hexdigest()
        place = Path(os.environ["KCOORD_LOCAL_DIR"], inspect.getmodule(function).__name__, key)  # type: ignore[union-attr]
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            compile(*args).path.rename(place)
        return types.SimpleNamespace(path=place)

    return call


def _call(call: str, namespace: dict[str, Any]) -> str:
    return str((eval(call, namespace).path / "kernel").read_text())


WAYS = {"call": _call}


@contextlib.contextmanager
def device(named: str | None) -> Iterator[None]:
    """A stand-in for torch whose current device is `named`."""
    if named is None:
        yield
        return
    text, _, ordinal = named.partition("#")
    target = GPUTarget.parse(text)
    torch, cuda = types.ModuleType("torch"), types.ModuleType("torch.cuda")
    vars(cuda).update(
        is_available=lambda: True,
        current_device=lambda: int(ordinal),
        get_device_capability=lambda device: divmod(int(target.arch), 10),
        get_device_properties=lambda device: types.SimpleNamespace(name=text),
    )
    vars(torch).update(cuda=cuda, version=types.SimpleNamespace(hip=None), Tensor=type("Tensor", (), {}))
    sys.modules["torch"] = torch
    try:
        yield
    finally:
        del sys.modules["torch"]
