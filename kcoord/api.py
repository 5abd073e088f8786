"""The generic API: this process's coordinator, and single flight for a compile function."""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.coordinator import Coordinator
from kcoord.errors import KeyFactorError
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import Scope
from kcoord.keys.function import function_factors
from kcoord.settings import FIELDS, Settings, variable

_Asked = tuple[object, ...]
_current: tuple[_Asked, Coordinator] | None = None
_lock = threading.Lock()  # protects _current


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_forget_after_fork)

_VARIABLES = tuple(variable(f.name) for f in FIELDS)


def connect(**flags: str | None) -> Coordinator:
    """This process's coordinator, made at the first call; it finds, or starts, the node's agent when it needs it.

    `flags` are settings by name, as text, and win over the environment; a different set makes a new coordinator. Raises
    `SettingsError` if a setting cannot be used.
    """
    global _current
    asked = (*map(os.environ.get, _VARIABLES), *flags.items())  # cheap: a hit of a few hundred µs passes here
    current = _current
    if current is not None and current[0] == asked:
        return current[1]
    with _lock:
        settings = Settings.from_environ(**flags)
        if _current is None or _current[1].settings != settings:
            _current = asked, Coordinator(settings)
        _current = asked, _current[1]
        return _current[1]


def compile_once(
    *,
    scope: Scope = Scope.DEVICE,
    ignore: tuple[str, ...] = (),
    load: Callable[[Artifact], Any] | None = None,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a compile function single flight: ``build(config, *, staging)`` becomes ``build(config) → Artifact``.

    The function writes its files into ``staging`` (a `Path`). Its key holds its source, defaults, closure, the globals that
    it reads (but those that `ignore` names), its arguments, and the device as `scope` says. With `load`, the call returns
    ``load(artifact)``. Raises `KeyFactorError` at the call for a value that cannot be keyed.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(function)
        if "staging" not in signature.parameters:
            raise KeyFactorError(f"{function.__qualname__} needs a keyword parameter 'staging': def …(…, *, staging)")
        open_ones = [p for n, p in signature.parameters.items() if n != "staging"]
        call_signature = signature.replace(parameters=open_ones)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            bound = call_signature.bind(*args, **kwargs)
            bound.apply_defaults()
            key = CacheKey.of(
                "python",
                function.__qualname__,
                arguments=dict(bound.arguments),
                **function_factors(function, frozenset(ignore)),
            )
            return connect().get_or_compile(
                key,
                lambda staging: function(*args, staging=staging, **kwargs),
                scope=scope,
                load=load,
            )

        return call

    return decorate
