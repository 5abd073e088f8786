"""The project's files that a function can reach: its own, and those that their import statements name, transitively.

Each counts whole, by its content, whether or not the code in it is called: an edit of a decorator, a class body or a constant is
a new key. Imports are found in the text, also inside functions and in branches, and nothing is imported for a key. The path of a
file decides whether it is the project's, and not the module's name.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import importlib.util
import os
import sys
import time
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys.function.definitions import definitions_of
from kcoord.keys.function.source import Import, Source, source_at
from kcoord.keys.packages import Owner, identity_of, is_project_file, owner_of, portable_name

_MOST_FILES = 10_000
_MOST_DEFINITIONS = 400
_COARSEST = 2_000_000_000  # ns, of the clocks of file systems
_MOST_NAMED = 64
"""Files that a key lists one by one. Of a larger project it lists those of functions that are called, and packages."""


@dataclass(frozen=True)
class _Module:
    """The place of a module: its file, if it has one, and the directories of its submodules, if it is a package."""

    name: str
    file: str | None
    directories: tuple[str, ...] | None
    live: types.ModuleType | None

    @property
    def package(self) -> str:
        return self.name if self.directories is not None else self.name.rpartition(".")[0]

    @property
    def is_project(self) -> bool:
        place = self.file or next(iter(self.directories or ()), "")
        return bool(place) and is_project_file(place)  # one that is built in has no place


@dataclass
class Files:
    """The files that are reached from what is added. `ignored` are patterns of modules' names and of paths.

    `digests` maps modules to the SHA-256 of their files; `unimported` paths of files that were not imported to theirs;
    `packages` has the identities of the installed packages that such files import. `edited` is a file whose text is not what
    runs, or ""; `fresh` are those of `unimported` that nobody has looked into,
    with their packages, and whether they may read anything that is there already.
    """

    ignored: tuple[str, ...] = ()
    digests: dict[str, str] = field(default_factory=dict)
    unimported: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    edited: str = ""
    fresh: list[tuple[Source, str, bool]] = field(default_factory=list)
    _own: dict[str, Source] = field(default_factory=dict)
    _names: dict[str, str] = field(default_factory=dict)
    _modules: dict[str, _Module | None] = field(default_factory=dict)
    _to_read: list[tuple[Source, str, bool]] = field(default_factory=list)

    def place_of(self, function: types.FunctionType) -> dict[str, Any] | None:
        """The place of a function in the project's files, to which its file is added; None if it has none, or if the file's text
        is not what runs: then it is `edited`.
        """
        path, namespace = function.__code__.co_filename, function.__globals__
        source = source_at(path) if path.startswith("/") and is_project_file(path) else None
        if source is None:
            return None
        if not source.holds(function.__code__):
            self.edited = self.edited or path
            return None
        name = str(namespace.get("__name__", ""))
        self._add(source, portable_name(name), str(namespace.get("__package__") or ""), True)
        self._read_all()
        self._own[self._names[path]] = source
        return {"file": self._names[path]} | source.place_of(function.__code__)

    def add_module(self, name: str) -> bool:
        """Add the file of a module, and those of the packages around it; False if it is not the project's."""
        found = self._reach(name, True)
        self._read_all()
        return found is not None

    def add_named(self, named: Iterable[str], beside: str) -> None:
        """Add files and directories, by paths from the directory `beside`, and modules by name; ``pkg.*``: all in a package.

        Raises `KeyFactorError` for one that is not there.
        """
        for each in named:
            name, is_package = each.removesuffix(".*"), each.endswith(".*")
            if "/" in each or each.endswith(".py"):
                path = Path(beside, each)
                for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                    source = source_at(str(file))
                    if source is None:
                        raise KeyFactorError(
                            f"files={each!r}: {path} cannot be read: name a file or directory that is there"
                        )
                    self._add(source, os.path.relpath(file, beside), "", True)
            elif (module := self._module(name)) is None or not (module.file or is_package):
                raise KeyFactorError(
                    f"files={each!r}: no module has this name: write 'package.module', 'package.*' or a path"
                )
            else:
                self._take((name, ("*",) if is_package else ()), "", True)
        self._read_all()

    def factor(self) -> dict[str, str]:
        if len(self.digests) <= _MOST_NAMED:
            return dict(self.digests)
        packages: dict[str, list[str]] = {}
        for name, digest in sorted(
            self.digests.items() - {(name, source.digest) for name, source in self._own.items()}
        ):
            packages.setdefault(name.rpartition(".")[0] or name, []).append(f"{name} {digest}")
        others = {
            f"{name}.*": hashlib.sha256("\n".join(files).encode()).hexdigest() for name, files in packages.items()
        }
        return others | {name: self.digests[name] for name in self._own if name in self.digests}

    def definitions(self) -> dict[str, dict[str, str]]:
        """Definitions in the files of functions, to name an edit; of the first files, in the order of calls."""
        found: dict[str, dict[str, str]] = {}
        for name, source in self._own.items():
            found[name] = definitions_of(source.text)
            if sum(map(len, found.values())) > _MOST_DEFINITIONS:
                break
        return found

    def _add(self, source: Source, name: str, package: str, live: bool) -> None:
        if source.path in self._names or any(
            fnmatch.fnmatch(each, p) for p in self.ignored for each in (name, source.path)
        ):
            self._names.setdefault(source.path, name)
            return
        while name in self.digests:
            name += "'"  # another file under one name
        self._names[source.path], self.digests[name] = name, source.digest
        if len(self.digests) > _MOST_FILES:
            raise KeyFactorError(
                f"it reaches more than {_MOST_FILES} files: name some in ignore_files=…, as in 'pkg.tests.*'"
            )
        if not live:
            self.unimported[source.path] = source.digest
        self._to_read.append((source, package, live))

    def _read_all(self) -> None:
        while self._to_read:
            source, package, live = self._to_read.pop()
            taken = [self._take(each, package, live) for each in source.imports]
            if source.path in self.unimported:
                is_star = any("*" in names for _, names in source.imports)
                self.fresh.append((source, package, source.looks_around or is_star or any(taken)))

    def _take(self, taken: Import, package: str, live: bool) -> bool:
        """Add the modules that an import statement names; true if one is imported already. `live`: the importing file is."""
        try:
            name = importlib.util.resolve_name(taken[0], package or None)
        except (ImportError, ValueError):
            return False
        module = self._reach(name, live)
        if module is None or module.directories is None:
            return module is not None and module.live is not None
        reached: list[_Module | None] = [module]
        for attribute in taken[1]:
            if attribute == "*":
                reached += [self._reach(f"{name}.{inner}", live) for inner in sorted(_submodules(module.directories))]
            elif isinstance(getattr(module.live, "__dict__", {}).get(attribute), (type(None), types.ModuleType)):
                reached.append(self._reach(f"{name}.{attribute}", live))
        return any(each is not None and each.live is not None for each in reached)

    def _reach(self, name: str, live: bool) -> _Module | None:
        """The module of this name, added with the packages around it; None if it is not the project's."""
        module, outer = self._module(name), name
        if module is None or not module.is_project:
            if module is not None and not live and owner_of(name) is Owner.INSTALLED:
                self.packages[name.partition(".")[0]] = identity_of(name)
            return None
        while outer and (each := self._module(outer)) is not None:
            source = source_at(each.file) if each.file else None
            if source is not None and source.path not in self._names:
                self._add(source, portable_name(outer), each.package, each.live is not None)
                if each.live is not None and not is_what_runs(source, each.live):
                    self.edited = self.edited or source.path
            outer = outer.rpartition(".")[0]
        return module

    def _module(self, name: str) -> _Module | None:
        if name not in self._modules:
            live = sys.modules.get(name)
            if isinstance(live, types.ModuleType):
                space = vars(live)
                directories = tuple(map(str, space["__path__"])) if "__path__" in space else None
                self._modules[name] = _Module(name, space.get("__file__"), directories, live)
            else:
                self._modules[name] = self._find(name)
        return self._modules[name]

    def _find(self, name: str) -> _Module | None:
        """A module that is not imported. Its parents are not imported for that."""
        parent, _, last = name.rpartition(".")
        above = self._module(parent) if parent else None
        if parent and (above is None or above.directories is None or not above.is_project):
            return None
        inside = list(above.directories or ()) if above else []
        try:
            spec = PathFinder.find_spec(name, inside) if above else importlib.util.find_spec(name)
            if spec is None:
                return None
            places = spec.submodule_search_locations
            file = spec.origin if spec.has_location else None
            return _Module(name, file, None if places is None else tuple(places), None)
        except KeyError:  # a namespace package below a parent that is not imported
            return _Module(
                name, None, tuple(str(each) for place in inside if (each := Path(place, last)).is_dir()), None
            )
        except Exception as error:  # noqa: BLE001 - a finder of the program's may raise anything
            let_through(error)
            return None


def changed_files(files: Mapping[str, str]) -> list[str]:
    """Those of `files`, each with the digest that it had, that are not as they were."""
    now = ((path, source_at(path)) for path in files)
    return [path for path, source in now if source is None or source.digest != files[path]]


def is_what_runs(source: Source, module: types.ModuleType) -> bool:
    """False if a file was edited in this process's life, and a function of the imported module is not of its text.

    Values that the edit changed are no matter: those that are read count by themselves.
    """
    if max(source.stamp[2:]) < _begun_ns():
        return True
    if source.is_text:
        return all(map(source.holds, _codes_of(module, source.path)))
    inode = str(source.stamp[0])  # a linker makes a new file
    with suppress(OSError), open("/proc/self/maps") as maps:  # noqa: PTH123 - line by line
        return any(inode in line.split()[4:5] for line in maps)
    return False


def _codes_of(module: types.ModuleType, path: str) -> Iterable[types.CodeType]:
    values = list(vars(module).values())  # a proxy may raise if it is asked for anything
    classes = [each for each in values if issubclass(type(each), type) and each.__module__ == module.__name__]
    for space in (vars(module), *map(vars, classes)):
        for value in space.values():
            function = value.__func__ if type(value) in (staticmethod, classmethod) else value
            code = getattr(function, "__code__", None) if type(function) is types.FunctionType else None
            if isinstance(code, types.CodeType) and code.co_filename == path:
                yield code


@functools.lru_cache(maxsize=1)
def _begun_ns() -> int:
    """The earliest time at which this process may have begun, in ns since the epoch; 0 if /proc does not tell."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
    booted = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return booted + ticks * (1_000_000_000 // os.sysconf("SC_CLK_TCK")) - _COARSEST


def _submodules(directories: Iterable[str]) -> set[str]:
    found = set()
    for directory in directories:
        try:
            found |= {each.name.partition(".")[0] for each in os.scandir(directory)}
        except OSError:
            continue
    return {name for name in found if name.isidentifier() and not name.startswith("__")}
