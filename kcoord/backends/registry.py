"""Hooking the compilers of this process, and of every process below it."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from kcoord.backends.base import fails_open, notices
from kcoord.settings import Settings

TRITON_MANAGER = "kcoord.backends.triton.cache_manager:TritonCacheManager"


def install() -> list[str]:
    """Hook the compilers of this process, those imported already and those imported later; idempotent.

    Returns the names of the backends that are hooked: none under ``KCOORD_DISABLE=1``. Raises `SettingsError` if a setting
    cannot be used. Not touched: a cache manager of your own (a warning says so).
    """
    settings = Settings.from_environ()
    if settings.disable:
        return []
    found = triton_environment(settings, os.environ)
    os.environ.update(found)
    if "TRITON_CACHE_MANAGER" not in found:
        return []
    if "triton.runtime.jit" in sys.modules:
        import_module("kcoord.backends.triton.cache_manager").hook()
    elif not any(isinstance(finder, _AfterImport) for finder in sys.meta_path):
        sys.meta_path.insert(
            0, _AfterImport("triton", lambda: import_module("kcoord.backends.triton.cache_manager").hook())
        )
    return ["triton"]


class _AfterImport(MetaPathFinder):
    """Calls `then` once, when the module `name` has been imported. It finds nothing itself; an error of `then` stays here."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name, self._then, self._looking = name, then, False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            self._execute_then(spec.loader)
        return spec

    def _execute_then(self, loader: Any) -> None:
        original = loader.exec_module

        @functools.wraps(original)
        def exec_module(module: ModuleType) -> None:
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                fails_open(lambda: None)(self._then)()

        with contextlib.suppress(AttributeError):  # a loader that cannot be changed: the first compile hooks
            loader.exec_module = exec_module


def triton_environment(settings: Settings, environ: Any) -> dict[str, str]:
    """The variables by which every Triton below this environment finds kcoord; empty if another manager is set."""
    manager = environ.get("TRITON_CACHE_MANAGER") or TRITON_MANAGER
    if manager != TRITON_MANAGER:
        notices.tell(f"TRITON_CACHE_MANAGER={manager} is set: kcoord leaves Triton to it; unset it to use kcoord")
        return {}
    default = str(settings.local_dir / "triton")
    return {
        "TRITON_CACHE_MANAGER": TRITON_MANAGER,
        "TRITON_CACHE_DIR": environ.get("TRITON_CACHE_DIR") or default,
    }
