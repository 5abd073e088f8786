"""Single flight for a compile function: `compile_once`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import UNLOADED, Backend
from kcoord.errors import KcoordError, KeyFactorError
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget, Scope
from kcoord.keys.live_key import Call, Declared, LiveKey
from kcoord.packs.recipe import Recipe
from kcoord.rank.connect import connect
from kcoord.rank.coordinator import ABSENT, Request


def compile_once(
    function: Callable[..., Any] | None = None,
    /,
    *,
    scope: Scope = Scope.DEVICE,
    load: Callable[[Artifact], Any] | None = None,
    environ: Iterable[str] = (),
    tools: Iterable[str] = (),
    trees: Iterable[str | os.PathLike[str]] = (),
    files: Iterable[str] = (),
    ignore_files: Iterable[str] = (),
    dynamic: Iterable[str] = (),
    ignore: Iterable[str] = (),
    on_drift: Literal["raise", "rekey"] = "raise",
) -> Callable[..., Any]:
    """Make a compile function single flight: ``build(config, *, staging)`` becomes ``build(config) → Artifact``.

    A decorator, with arguments or without: ``@compile_once`` is ``@compile_once()``.

    The function writes its files into ``staging`` (a `Path`). With `load`, the call returns ``load(artifact)``. A keyword
    parameter ``target`` without a default is given the `GPUTarget` to compile for; with `Scope.TARGET`, such a function can be
    warmed up for GPUs that are not there.

    Its key, read live at each call, holds: its arguments (tensors by their metadata); the project's files that its code can
    reach, whole; the values that the function and its helpers read; the device, as `scope` says; and the variables of the
    environment that compilers commonly read, that the code reads by a constant name, or that `environ` names.
    Declare its other inputs: `tools` that it runs (names on PATH, or paths; they count by content), `trees` of files that it
    reads (directories or files), and in `files` modules that it imports by a computed name (``plugins.*``) or their paths.
    `ignore_files` are patterns of modules or paths that do not count (``myproject.tests.*``).
    Tensors that `dynamic` names count by the divisibility that kernels are specialized on, not by exact sizes and strides.
    `ignore` names globals, closure variables and variables of the environment that do not change its output (a logger).

    ``build.key(config)`` is the key that a call would have. Raises at the call: `KeyFactorError` for a value without identity;
    `GlobalsDrift` if an input (not an argument, a variable, a tool) has changed since it was compiled in this process, unless
    `on_drift` is ``"rekey"``, which makes a new key, or while it was compiled; and as `Coordinator.get_or_compile` does.
    Not seen: objects that are reached by a computed name, ``getattr(module, name)``; files and network that nobody declared.
    """
    if on_drift not in ("raise", "rekey"):
        raise KeyFactorError(f'on_drift={on_drift!r}: it must be "raise" or "rekey"')
    declared = Declared(
        scope,
        frozenset(_several(ignore)),
        frozenset(_several(environ)),
        _several(tools),
        tuple(map(os.fspath, _several(trees))),
        frozenset(_several(dynamic)),
        tuple(map(str, _several(files))),
        tuple(map(str, _several(ignore_files))),
        load,
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if "staging" not in inspect.signature(function).parameters:
            raise KeyFactorError(f"{function.__qualname__} needs a keyword parameter 'staging': def …(…, *, staging)")
        live = LiveKey(function, declared, lambda: connect().settings.local_dir)
        compiles = _Compiles(function, live, load)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            asked = live.of(args, kwargs)
            handle = connect().in_memory(asked.key, asked.device)  # as `obtain` would, in half the time
            if handle is not ABSENT:
                return handle
            if on_drift == "raise":
                live.check(asked)
            handle = backend.obtain(_Request(compiles, asked, args, kwargs), _no_native_compiler)
            live.served(asked)
            return handle

        def warm(args: tuple[Any, ...], kwargs: dict[str, Any], waits: bool, target: GPUTarget | None = None) -> str:
            """For `kcoord.warmup`: ``compiled``, ``loaded`` (nothing is loaded yet) or, without `waits`, ``busy``."""
            asked = live.of(args, kwargs, target)
            return backend.prepare(_Request(compiles, asked, args, kwargs, records=False), waits)

        call.key = lambda *args, **kwargs: live.of(args, kwargs).key  # type: ignore[attr-defined]
        call.declared = declared  # type: ignore[attr-defined]
        call.warm = warm  # type: ignore[attr-defined]
        return call

    return decorate if function is None else decorate(function)


@dataclass(frozen=True)
class _Compiles:
    """A decorated function."""

    function: Callable[..., Any]
    live: LiveKey
    load: Callable[[Artifact], Any] | None


class _Request(NamedTuple):
    """One call of it. A call that is a warm-up `records` no recipe."""

    of: _Compiles
    asked: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    records: bool = True


class PythonBackend(Backend[_Request, Any]):
    """`compile_once`. Its callers use kcoord by name: they get errors, and `CompileFailed` if another rank failed, too."""

    name = "python"
    raises_errors = True

    def label(self, request: _Request) -> str:
        return request.of.function.__qualname__

    def key(self, request: _Request) -> CacheKey:
        return request.asked.key

    def device(self, request: _Request) -> DeviceKey:
        return request.asked.device

    def adjust(self, request: _Request, wanted: Request) -> Request:
        files = request.asked.state.content.files
        return wanted._replace(explain=lambda: {"definitions": files.definitions()})

    def compile(self, request: _Request, staging: Path) -> Any:
        target = {"target": request.asked.device.target} if request.of.live.takes_target else {}
        request.of.function(*request.args, staging=staging, **request.kwargs, **target)
        request.of.live.check_still(request.asked)
        return UNLOADED

    def unchanged(self, request: _Request) -> bool:
        return request.of.live.is_shared(request.asked)

    def load(self, request: _Request, artifact: Artifact) -> Any:
        return request.of.load(artifact) if request.of.load else artifact

    def recipe(self, request: _Request, seconds: float) -> Recipe | None:
        """A recipe holds for other GPUs if the function is told its target and depends on nothing else of the device."""
        if not request.records:
            return None
        live, target = request.of.live, request.asked.device.target
        is_portable = live.takes_target and live.scope is Scope.TARGET and target.backend != "cpu"
        return recipe_of(request.of.function, request.args, request.kwargs, target if is_portable else None, seconds)

    def replay(self, recipe: Recipe, target: GPUTarget | None, waits: bool) -> str:
        function = attrgetter(recipe.qualname)(import_module(recipe.module))
        return replay_call(function, tuple(recipe.call["args"]), recipe.call["kwargs"], waits, target)


backend = PythonBackend()


def _no_native_compiler() -> Any:
    raise KcoordError("a compile_once function needs kcoord for its staging directory")


def _several(names: Any) -> tuple[Any, ...]:
    return (names,) if isinstance(names, (str, os.PathLike)) else tuple(names)


def recipe_of(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: GPUTarget | None, seconds: float
) -> Recipe | None:
    """The recipe of a call; None if the function cannot be imported, or an argument is no plain value."""
    module, qualname = function.__module__, function.__qualname__
    if module == "__main__" or "<locals>" in qualname:
        return None
    return Recipe.of("python", module, qualname, {"args": args, "kwargs": kwargs}, target, seconds)


def replay_call(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], waits: bool, target: GPUTarget | None = None
) -> str:
    """``compiled``, ``loaded`` or, without `waits`, ``busy``."""
    if not hasattr(function, "warm"):
        raise KcoordError(
            f"{getattr(function, '__qualname__', function)} is no compile function: decorate it with compile_once"
        )
    how: str = function.warm(args, kwargs, waits, target)
    return how
