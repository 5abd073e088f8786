"""The compilers that kcoord knows, and hooking those that this process imports.

Others are added by an entry point of the group ``kcoord.backends``: its name is `Backend.name`, its value the class. No compiler
is imported here. A backend that cannot be loaded is named once, and its compiler works as without kcoord.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from kcoord.artifacts import local
from kcoord.backends.base import Backend
from kcoord.backends.fail_open import fails_open, notices
from kcoord.errors import KcoordError, StoreError
from kcoord.files.private import check_tier, make_own, make_tier
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.settings import Settings

GROUP = "kcoord.backends"
_BUILT_IN = {
    "triton": "kcoord.backends.triton.backend:TritonBackend",
    "inductor": "kcoord.backends.inductor.backend:InductorBackend",
    "ninja": "kcoord.backends.ninja.backend:NinjaBackend",
    "tilelang": "kcoord.backends.tilelang.backend:TileLangBackend",
    "flydsl": "kcoord.backends.flydsl.backend:FlyDSLBackend",
    "ninetoothed": "kcoord.backends.ninetoothed.backend:NineToothedBackend",
    "cutedsl": "kcoord.backends.cutedsl.backend:CuTeDSLBackend",
}
_EXPLICIT = {"python": "kcoord.backends.python.compile_once:PythonBackend"}  # nothing to hook: loaded when it is used


def install() -> list[str]:
    """Hook the compilers of this process, those imported already and those imported later; idempotent.

    Returns the names of the backends that are hooked: none under ``KCOORD_DISABLE=1``. Raises `SettingsError` if a setting
    cannot be used. A compiler that the user has given another cache, or one that others may write to, is left alone, and so are
    all if others may write to the local directory (a warning says so).
    """
    settings = Settings.from_environ()
    if settings.disable:
        return []
    try:
        make_tier(settings.local_dir)
    except StoreError as error:
        let_through(error)
        notices.tell(f"KCOORD_LOCAL_DIR={error}; kcoord leaves compilers alone")
        return []
    hooked = []
    for backend in _unobstructed(settings, os.environ):
        os.environ.update(backend.child_environ(settings, os.environ))
        for module in backend.modules:
            _hook_once_imported(module, backend)
        hooked.append(backend.name)
    return hooked


@fails_open(lambda: None)
def install_openly() -> None:
    """As `install`, for processes that nobody wrote for kcoord: an error is told, and this process runs without."""
    try:
        install()
    except KcoordError as error:
        notices.tell(f"{error}; this rank runs without kcoord")


def child_environ(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables by which every compiler in a child process of this environment finds kcoord."""
    found: dict[str, str] = {}
    for backend in _unobstructed(settings, environ):
        found |= backend.child_environ(settings, environ)
    return found


@functools.lru_cache(maxsize=1)
def backends() -> tuple[Backend[Any, Any], ...]:
    """The backends that hook a compiler, installed or not."""
    found = [EntryPoint(name, path, GROUP) for name, path in _BUILT_IN.items()]
    others = [each for each in entry_points(group=GROUP) if each.name not in {**_BUILT_IN, **_EXPLICIT}]
    return tuple(backend for each in (*found, *others) if (backend := _made(each)) is not None)


def place_of(key: CacheKey) -> str:
    """The place below the local directory at which a rank looks for the artifact of `key`."""
    places = (fails_open(lambda key: None)(backend.place)(key) for backend in backends())
    return next((place for place in places if place is not None), local.place_of(key.digest))


def replayer(kind: str) -> Backend[Any, Any] | None:
    """The backend that replays recipes of this kind; None if there is none here."""
    path = _EXPLICIT.get(kind)
    known = (_made(EntryPoint(kind, path, GROUP)),) if path else backends()
    return next((each for each in known if each is not None and kind in each.recipes), None)


@functools.lru_cache(maxsize=64)
def _made(registered: EntryPoint) -> Backend[Any, Any] | None:
    try:
        kind = registered.load()
        if not (isinstance(kind, type) and issubclass(kind, Backend)) or kind.name != registered.name:
            raise TypeError(f"{registered.value} is no Backend of this name")
        return kind()
    except Exception as error:  # noqa: BLE001 - another package's import may raise anything
        let_through(error)
        notices.tell(f"the backend {registered.name!r} is left alone: {type(error).__name__}: {error}")
        return None


def obstacle(backend: Backend[Any, Any], settings: Settings, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """Why `backend` cannot be hooked in this environment, and the remedy; None if nothing keeps it.

    The compiler's own directories must be this user's alone: files of others are neither loaded nor shared. Those that it is
    given in the local directory are made here, whatever the umask.
    """
    found = backend.obstacle(environ)
    if found is not None:
        return found
    named, given = backend.tiers(environ), _given(backend, settings, environ)
    for name, tier in {**given, **named}.items():
        try:
            if name in named:
                check_tier(tier)
            else:
                make_own(tier)
        except StoreError as error:
            let_through(error)
            return f"{name}={error}", f"until then kcoord leaves {backend.name} alone"
        except OSError as error:
            let_through(error)  # there is no local directory, which is told elsewhere
    return None


def _given(backend: Backend[Any, Any], settings: Settings, environ: Mapping[str, str]) -> dict[str, Path]:
    """The directories below the local directory that `backend` gives its compiler, by variable."""
    variables = backend.child_environ(settings, environ).items()
    return {name: Path(value) for name, value in variables if Path(value).is_relative_to(settings.local_dir)}


def _unobstructed(settings: Settings, environ: Mapping[str, str]) -> Iterator[Backend[Any, Any]]:
    for backend in backends():
        found = obstacle(backend, settings, environ)
        if found is None:
            yield backend
        else:
            notices.tell("; ".join(found))


def _hook_once_imported(name: str, backend: Backend[Any, Any]) -> None:
    module = sys.modules.get(name)
    if module is not None:
        if not getattr(getattr(module, "__spec__", None), "_initializing", False):
            fails_open(lambda: None)(backend.hook)()
    elif not any(isinstance(each, _AfterImport) and each.is_for(name, backend) for each in sys.meta_path):
        sys.meta_path.insert(0, _AfterImport(name, backend))


class _AfterImport(MetaPathFinder):
    """Hooks `backend` once, when the module `name` has been imported. It finds nothing itself; an error of a hook stays here."""

    def __init__(self, name: str, backend: Backend[Any, Any]) -> None:
        self._name, self._backend, self._looking = name, backend, False

    def is_for(self, name: str, backend: Backend[Any, Any]) -> bool:
        return (self._name, self._backend) == (name, backend)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != self._name or self._looking:
            return None
        self._looking = True
        try:
            spec = find_spec(name)
        finally:
            self._looking = False
        if spec is not None and spec.loader is not None:
            self._hook_after(spec.loader)
        return spec

    def _hook_after(self, loader: Any) -> None:
        original: Callable[[ModuleType], None] = loader.exec_module

        @functools.wraps(original)
        def exec_module(module: ModuleType) -> None:
            original(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                fails_open(lambda: None)(self._backend.hook)()

        with contextlib.suppress(AttributeError):  # a loader that cannot be changed: the first compile hooks
            loader.exec_module = exec_module
