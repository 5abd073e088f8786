"""The compilers that kcoord knows, and hooking those that this process imports.

Others are added by an entry point of the group ``kcoord.backends``: its name is `Compiler.name`, its value the declaration. No
compiler is imported here, and no adapter but for a replay. If a declaration cannot be loaded, a notice names the compiler, which
works as without kcoord.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kcoord.backends.compiler import Compiler
from kcoord.backends.fail_open import fails_open, notices
from kcoord.errors import KcoordError, StoreError
from kcoord.files.private import check_tier, make_own, make_tier
from kcoord.interruption import let_through
from kcoord.ranks import HOOK
from kcoord.settings import Settings

if TYPE_CHECKING:
    from kcoord.backends.backend import Backend

GROUP = "kcoord.backends"
BUILT_IN = ("triton", "inductor", "ninja", "tilelang", "flydsl", "ninetoothed", "cutedsl", "cutile", "helion", "python")
"""Each is a folder beside this module, which holds its declaration."""


def install() -> list[str]:
    """Hook the compilers of this process, those imported already and those imported later; idempotent.

    Returns the names of the compilers that are hooked: none under ``KCOORD_DISABLE=1``. Raises `SettingsError` if a setting
    cannot be used. A compiler that the user has given another cache, or one that others may write to, is left alone, and so are
    all if others may write to the local directory (a warning says so).
    """
    settings = Settings.of_job()
    if settings.disable:
        return []
    try:
        make_tier(settings.local_dir)
    except StoreError as error:
        let_through(error)
        notices.tell(f"KCOORD_LOCAL_DIR={error}; kcoord leaves compilers alone")
        return []
    hooked = []
    for compiler in _unobstructed(settings, os.environ):
        os.environ.update(compiler.child_environ(settings, os.environ))
        for module, hooks in compiler.modules.items():
            _hook_once_imported(module, hooks)
        if compiler.modules:
            hooked.append(compiler.name)
    return hooked


@fails_open(lambda: None)
def install_openly() -> None:
    """As `install`, for scripts that do not call it: an error is told, and this process runs without kcoord."""
    try:
        install()
    except KcoordError as error:
        notices.tell(f"{error}; this rank runs without kcoord")


def child_environ(settings: Settings, environ: Mapping[str, str], *, has_kcoord: bool = True) -> dict[str, str]:
    """The variables by which every compiler in a child process of this environment finds kcoord.

    Without `has_kcoord` the child's Python may lack it: then torch finds it (`kcoord.autoload`), and without torch nothing does.
    """
    found = {HOOK: "1"}
    for compiler in _unobstructed(settings, environ):
        variables = compiler.child_environ(settings, environ).items()
        found |= {name: value for name, value in variables if has_kcoord or name not in compiler.imports}
    return found


@functools.lru_cache(maxsize=1)
def compilers() -> tuple[Compiler, ...]:
    """The declarations of all compilers, installed or not."""
    found = {name: f"kcoord.backends.{name}:COMPILER" for name in BUILT_IN}
    for each in entry_points(group=GROUP):
        found.setdefault(each.name, each.value)
    return tuple(filter(None, (_declared(name, path) for name, path in found.items())))


def compiler_of(name: str) -> Compiler | None:
    """The compiler of this name, which its recipes have, too; None if there is none here."""
    return next((each for each in compilers() if each.name == name), None)


def is_installed(module: str) -> bool:
    """True if the package of this module of a compiler is here. It is not imported.

    The package is the first of its parents that is no namespace: ``cuda`` holds torch's bindings where ``cuda.tile`` is not.
    """
    parts = module.split(".")
    for end in range(1, len(parts) + 1):
        spec = find_spec(".".join(parts[:end]))
        if spec is None or spec.origin is not None:
            return spec is not None
    return True


def replayer(name: str) -> Backend[Any, Any]:
    """The backend of this name, for a replay. Its compiler is imported.

    Raises `KcoordError` if there is none here, and the exceptions of the imports.
    """
    from kcoord.backends.backend import Backend  # weight: a process whose compilers are hooked may compile nothing

    compiler = compiler_of(name)
    if compiler is None or not compiler.backend:
        raise KcoordError(f"no compiler here has recipes of the kind {name!r}")
    for module in list(compiler.modules)[:1]:
        import_module(module)  # before the adapter, which imports it: its hooks import the adapter
    found: Backend[Any, Any] = _loaded(compiler.name, compiler.backend, Backend)
    return found


def _declared(name: str, path: str) -> Compiler | None:
    try:
        declared: Compiler = _loaded(name, path, Compiler)
        return declared
    except Exception as error:  # noqa: BLE001 - another package's import may raise anything
        let_through(error)
        notices.tell(f"the compiler {name!r} is left alone: {type(error).__name__}: {error}")
        return None


def _loaded(name: str, path: str, kind: Any) -> Any:
    """The object at ``module:attribute``. Raises TypeError if it is of another kind or name, and the import's exceptions."""
    found = EntryPoint(name, path, GROUP).load()
    if not isinstance(found, kind) or found.name != name:
        raise TypeError(f"{path} is no {kind.__name__} of this name")
    return found


def obstacle(compiler: Compiler, settings: Settings, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The reason why `compiler` cannot be hooked in this environment, and the remedy; None if nothing keeps it.

    The compiler's own directories must be this user's alone: files of others are neither loaded nor shared. Those that it is
    given in the local directory are made here, whatever the umask.
    """
    found = compiler.obstacle(environ)
    if found is not None:
        return found
    named, variables = compiler.tiers(environ), compiler.child_environ(settings, environ)
    given = {name: Path(value) for name, value in variables.items() if Path(value).is_relative_to(settings.local_dir)}
    for name, tier in {**given, **named}.items():
        try:
            if name in named:
                check_tier(tier)
            else:
                make_own(tier)
        except StoreError as error:
            let_through(error)
            return f"{name}={error}", f"until then kcoord leaves {compiler.name} alone"
        except OSError as error:
            let_through(error)  # there is no local directory, which is told elsewhere
    return None


def _unobstructed(settings: Settings, environ: Mapping[str, str]) -> Iterator[Compiler]:
    for compiler in compilers():
        found = obstacle(compiler, settings, environ)
        if found is None:
            yield compiler
        else:
            notices.tell("; ".join(found))


# Hooks.


@fails_open(lambda name, hooks: None)
def _hook(name: str, hooks: str) -> None:
    """Hook the compiler that has the module `name`."""
    try:
        import_module(hooks).hook()
    except Exception as error:
        let_through(error)
        from kcoord.backends import reliances  # weight, as above

        compiler = next((each.name for each in compilers() if hooks in each.modules.values()), name)
        release = reliances.release_of(name.partition(".")[0])
        reliances.stand_aside(compiler, release, "hooks", f"{type(error).__name__}: {error}")
        raise


def is_imported(name: str) -> bool:
    """True if the import of the module `name` has ended: one that is under way lacks names that are defined later."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return name in sys.modules and (name in _finder.ended or not getattr(spec, "_initializing", False))


def _hook_once_imported(name: str, hooks: str) -> None:
    if is_imported(name):
        _hook(name, hooks)
        return
    _finder.expect(name, hooks)
    if name in sys.modules:  # its import is under way: it imports torch, which installs kcoord
        sys.modules[name].__spec__.__class__ = _Importing


class _Finder(MetaPathFinder):
    """Finds the modules that are to be hooked as the other finders do, and hooks each one after its first import.

    A module's own loader is in its place again before the module's code runs.
    """

    def __init__(self) -> None:
        self._hooks: dict[str, list[str]] = {}
        self.ended: set[str] = set()  # modules that were imported, and of which importlib does not say so yet

    def expect(self, name: str, hooks: str) -> None:
        expected = self._hooks.setdefault(name, [])
        if hooks not in expected:
            expected.append(hooks)
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def imported(self, name: str) -> None:
        self.ended.add(name)
        for hooks in self._hooks.pop(name, ()):
            _hook(name, hooks)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._hooks:
            return None
        others = (getattr(each, "find_spec", None) for each in sys.meta_path if each is not self)
        spec = next((found for find in others if find is not None and (found := find(name, path, target))), None)
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Loader(spec.loader)
        return spec


class _Importing(ModuleSpec):
    """The spec of a module that is to be hooked, and whose import began before that. It is a plain one once that has ended."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value)
        if name == "_initializing" and not value:
            self.__class__ = ModuleSpec  # type: ignore[assignment]
            if self.name in sys.modules:  # not after a failure
                _finder.imported(self.name)


class _Loader(Loader):
    """The loader of a module that is to be hooked. It is `native` in all else."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        found: ModuleType | None = self._native.create_module(spec)
        return found

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._native
        module.__loader__ = self._native
        self._native.exec_module(module)
        _finder.imported(module.__name__)


_finder = _Finder()
