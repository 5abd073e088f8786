"""Single flight for a compile function: `compile_once`."""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from kcoord.artifacts.local import Artifact
from kcoord.errors import KeyFactorError
from kcoord.keys.device import GPUTarget, Scope
from kcoord.keys.live_key import Call, Declared, LiveKey
from kcoord.rank.connect import connect
from kcoord.rank.coordinator import ABSENT, Busy, Coordinator


def compile_once(
    *,
    scope: Scope = Scope.DEVICE,
    load: Callable[[Artifact], Any] | None = None,
    environ: Iterable[str] = (),
    tools: Iterable[str] = (),
    trees: Iterable[str | os.PathLike[str]] = (),
    dynamic: Iterable[str] = (),
    ignore: Iterable[str] = (),
    on_drift: Literal["raise", "rekey"] = "raise",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a compile function single flight: ``build(config, *, staging)`` becomes ``build(config) → Artifact``.

    The function writes its files into ``staging`` (a `Path`). With `load`, the call returns ``load(artifact)``. A keyword
    parameter ``target`` without a default is given the `GPUTarget` to compile for; with `Scope.TARGET`, such a function can be
    warmed up for GPUs that are not there.

    Its key, read live at each call, holds: its arguments (tensors by their metadata); what it says, with its helpers, defaults,
    closure and the globals that they read; the device, as `scope` says; and the variables of the environment that compilers
    commonly read, that it reads by a constant name, or that `environ` names. What it reads otherwise must be declared: `tools`
    that it runs (names on PATH, or paths; they count by content) and `trees` of files that it reads (directories or files).
    Tensors that `dynamic` names count by what Triton specializes on, not by exact sizes and strides. `ignore` names globals,
    closure variables and variables of the environment that do not change what it makes (a logger).

    ``build.key(config)`` is the key that a call would have. Raises at the call: `KeyFactorError` for a value without identity;
    `GlobalsDrift` if something that it reads (not an argument, a variable, a tool) has changed since it was compiled in this
    process, unless `on_drift` is ``"rekey"``, which makes a new key, or while it was compiled; and what
    `Coordinator.get_or_compile` raises.
    Not seen: what is reached by a computed name, ``getattr(module, name)``, and files and network that nobody declared.
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
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if "staging" not in inspect.signature(function).parameters:
            raise KeyFactorError(f"{function.__qualname__} needs a keyword parameter 'staging': def …(…, *, staging)")
        live = LiveKey(function, declared, lambda: connect().settings.local_dir)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            asked = live.of(args, kwargs)
            coordinator = connect()
            handle = coordinator.in_memory(asked.key, asked.device)
            if handle is not ABSENT:
                return handle
            if on_drift == "raise":
                live.check(asked)

            def compile(staging: Path) -> None:
                begun = time.perf_counter()
                function(*args, staging=staging, **kwargs, **given(asked))
                live.check_still(asked)
                record(asked, args, kwargs, time.perf_counter() - begun)  # before it is published, which delivers it

            def loaded(artifact: Artifact) -> Any:
                record(asked, args, kwargs, artifact.manifest.compile_seconds)
                return load(artifact) if load else artifact

            handle = coordinator.serve(asked.key, asked.device, compile, loaded)
            live.served(asked)
            return handle

        def given(asked: Call) -> dict[str, Any]:
            return {"target": asked.device.target} if live.takes_target else {}

        def record(asked: Call, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float) -> None:
            coordinator = connect()
            if coordinator.settings.profile:
                for_others = live.takes_target and scope is Scope.TARGET and asked.device.target.backend != "cpu"
                _record(coordinator, function, args, kwargs, str(asked.device.target) if for_others else "", seconds)

        def warm(args: tuple[Any, ...], kwargs: dict[str, Any], waits: bool, target: GPUTarget | None = None) -> str:
            """For `kcoord.warmup`: ``compiled``, ``loaded`` (nothing is loaded yet) or, without `waits`, ``busy``."""
            asked, how = live.of(args, kwargs, target), "loaded"

            def compile(staging: Path) -> None:
                nonlocal how
                how = "compiled"
                function(*args, staging=staging, **kwargs, **given(asked))
                live.check_still(asked)

            found = connect().ensure(asked.key, asked.device, compile, wait=waits, loads=False)
            return "busy" if isinstance(found, Busy) else how

        call.key = lambda *args, **kwargs: live.of(args, kwargs).key  # type: ignore[attr-defined]
        call.warm = warm  # type: ignore[attr-defined]
        return call

    return decorate


def _record(
    coordinator: Coordinator, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], target: str, seconds: float
) -> None:
    from kcoord.backends.python.recipes import recipe_of

    recipe = recipe_of(function, args, kwargs, target, seconds, time.monotonic_ns())
    if recipe is not None:
        coordinator.record(recipe)


def _several(names: Any) -> tuple[Any, ...]:
    return (names,) if isinstance(names, (str, os.PathLike)) else tuple(names)
