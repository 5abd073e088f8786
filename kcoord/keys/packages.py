"""The owner of a module (the project, an installed package or Python), and the identity of an installed package.

A project's own functions are keyed by content. Installed packages (``site-packages``) and Python's modules are keyed by name:
an installed package with its version and the hashes that its installer recorded, so that ``pip install .`` without a new
version number is a change too. Not seen: an installed file that was edited by hand.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import functools
import hashlib
import importlib.util
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

_NOT_FOLLOWED = frozenset(("kcoord", "torch", "triton"))
"""Never the project, not even in a checkout: torch and Triton are too large, and state their versions; kcoord does not change
what a compile produces."""
_SITE = frozenset(("site-packages", "dist-packages"))
_MAINS = ("__main__", "__mp_main__")
_PYTHONS = (
    *(Path(os.__file__).parent, Path(os.__file__).resolve().parent),
    Path(sys.base_exec_prefix, sys.platlibdir, f"python{sys.version_info[0]}.{sys.version_info[1]}"),
)
_GENERATED = "torch._inductor.runtime.compile_tasks"
_MOST_READ = 1 << 20  # bytes
_SCRIPT = re.compile(r"(\.\./)+(bin|Scripts)/")


class Owner(enum.Enum):
    PROJECT = "project"
    INSTALLED = "installed"
    PYTHON = "python"


_NAMELESS = "<none>"
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a ``class`` statement, or like one


def module_of(thing: Any) -> str:
    """The name of the module that a function or a class belongs to; ``<none>``, which counts as the project's, if it has none.

    Code that runs in a namespace without a ``__name__`` makes functions without a module, and classes that claim to be of
    ``builtins``.
    """
    module = getattr(thing, "__module__", None)
    if isinstance(thing, types.FunctionType):
        return module if isinstance(module, str) and "__name__" in thing.__globals__ else _NAMELESS
    if isinstance(thing, type):
        if not isinstance(module, str):
            return _NAMELESS
        if module == "builtins" and thing.__flags__ & HEAP_TYPE:
            return module if getattr(builtins, thing.__qualname__, None) is thing else _NAMELESS
        return module
    return module if isinstance(module, str) and module else "builtins"


def owner_of(thing: Any) -> Owner:
    """The owner of a function, a class, a module, or of the module of a name, by the file of its code.

    A name alone says too little: a project may have a ``queue.py``, load a module by its path under an installed name, and send
    functions by value to a worker whose ``__main__`` is installed. A module without a file, made by ``exec``, is the project's.
    """
    if isinstance(thing, str):
        return _owner(thing, _file_of(thing) or _file_of(thing.partition(".")[0]))
    if isinstance(thing, types.ModuleType):
        file = vars(thing).get("__file__")
        return _owner(thing.__name__, file) if file and _is_file(file) else owner_of(thing.__name__)
    module = module_of(thing)
    owner = owner_of(module)  # a project's name is enough: an installed decorator's wrapper has that of what it wraps
    return Owner.PROJECT if owner is not Owner.PROJECT and _came_by_value(thing, module) else owner


@functools.lru_cache(maxsize=4096)
def _owner(module: str, file: str | None) -> Owner:
    top, site = module.partition(".")[0], _site_of(file)
    has_file = file is not None and _is_file(file)
    if has_file and is_project_file(str(file)) and not module.startswith(f"{_GENERATED}."):
        return Owner.PROJECT
    if site is None and (top in sys.stdlib_module_names or top == "builtins"):
        return Owner.PYTHON
    return Owner.INSTALLED if has_file or site is not None or top in _NOT_FOLLOWED else Owner.PROJECT


def is_project_file(file: str) -> bool:
    """True unless a file, or a directory of a package, is of an installed package or of Python; it need not exist."""
    return _is_project_directory(os.path.dirname(file))  # noqa: PTH120 - of thousands


@functools.lru_cache(maxsize=4096)
def _is_project_directory(directory: str) -> bool:
    parents = (path := Path(directory), *path.parents)
    if any(parent.name in _SITE or parent in _PYTHONS for parent in parents):
        return False
    return not any(_home_of(top) in parents for top in _NOT_FOLLOWED)


def _home_of(top: str) -> Path | None:
    """The directory of torch, Triton or kcoord, which may be a checkout."""
    file = _file_of(top)
    return Path(file).parent if file is not None else None


def _came_by_value(thing: Any, module: str) -> bool:
    """True if a function or a class has the name of `module`, but is neither in it nor of its file: it is the project's."""
    if isinstance(thing, type):
        if is_found(thing) or not thing.__flags__ & HEAP_TYPE:
            return False
        methods = [f for f in vars(thing).values() if isinstance(f, types.FunctionType)]
        methods.sort(key=lambda method: method.__module__ != module)  # those that were put there later are last
        files = (method.__code__.co_filename for method in methods)
        file = next(
            (f for f in files if _is_file(f) and (is_project_file(f) or _site_of(f))), None
        )  # not dataclasses.py
        if file is None:
            return "<locals>" not in thing.__qualname__
    elif isinstance(thing, types.FunctionType):
        file = thing.__code__.co_filename
        if module in _MAINS:
            return file != getattr(sys.modules.get(module), "__file__", None)
    else:
        return False
    return file is not None and _is_file(file) and is_project_file(file)


def is_found(kind: Any) -> bool:
    """True if a class or a function is in its module, under its name: else it is local to a function, or came by value."""
    found: Any = sys.modules.get(kind.__module__)
    for name in kind.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is kind


@functools.lru_cache(maxsize=4096)
def _is_file(file: str) -> bool:
    """Not so ``<string>``, or a file of the machine that compiled an installed module."""
    return Path(file).is_absolute() and Path(file).exists()


def portable_name(module: str) -> str:
    """The name that `module` has when it is imported: ``python train.py`` and ``import train`` are the same code.

    A child that `multiprocessing` spawns has the script under a third name. Inductor names a module by the hash of its file,
    which contains the index of a GPU.
    """
    if module == "pathlib._local":  # of Python 3.13
        return "pathlib"
    if module not in _MAINS:
        return _GENERATED if module.startswith(f"{_GENERATED}.") else module
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in _MAINS:
        name: str = spec.name
        return name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else "__main__"


def label_of(thing: Any) -> str:
    """The name of a function or a class in a key."""
    return f"{portable_name(module_of(thing))}.{thing.__qualname__}"


def identity_of(module: str) -> str:
    """``name version hash`` of the installed package that `module` belongs to; only the name for Python's own."""
    top = module.partition(".")[0]
    return top if owner_of(module) is Owner.PYTHON else _installed(top)


@functools.lru_cache(maxsize=1024)
def _installed(top: str) -> str:
    if top == "kcoord":
        return top
    file = _file_of(top)
    directory = _site_of(file)
    found = recorded(directory, top) if directory is not None else ""
    return f"{top} {found or _hash_files(file)}"


def _file_of(module: str) -> str | None:
    """The file or directory of a module; a top-level one need not be imported for that."""
    found: Any = sys.modules.get(module)
    if found is None:
        return None if "." in module else _file_to_import(module)
    space = getattr(found, "__dict__", {})  # a module's own `__getattr__` may import
    file = space.get("__file__")
    return file if file else next(iter(space.get("__path__") or ()), None)  # a namespace package


@functools.lru_cache(maxsize=1024)
def _file_to_import(top: str) -> str | None:
    with contextlib.suppress(ValueError, ImportError):
        found = importlib.util.find_spec(top)
        file = getattr(found, "origin", None)
        return file if file else next(iter(getattr(found, "submodule_search_locations", None) or ()), None)
    return None


def _site_of(file: str | None) -> Path | None:
    """The directory that a package was installed into."""
    return next((p for p in Path(file).parents if p.name in _SITE), None) if isinstance(file, str) else None


def recorded(site: Path, top: str) -> str:
    """The version of a distribution, or of that of the module `top`, and a hash of its RECORD; empty if it has none.

    The hash leaves out files that differ between installations of one wheel: bytecode, metadata, and scripts, which begin with
    the path of the interpreter that they were installed for.
    """
    versions, lines = [], []
    for info in _distributions(str(site)).get(_normal(top)) or _by_top_level(str(site)).get(top, []):
        found = [
            line
            for line in _lines(info)
            if ",sha256=" in line and ".dist-info/" not in line and ".pyc," not in line and not _SCRIPT.match(line)
        ]
        if found:
            versions.append(info.name.removesuffix(".dist-info").partition("-")[2])
            lines += found
    digest = hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]
    return f"{' '.join(versions)} {digest}" if lines else ""


def _lines(info: Path) -> list[str]:
    try:
        return (info / "RECORD").read_text().splitlines()
    except (OSError, ValueError):
        return []


@functools.lru_cache(maxsize=64)
def _distributions(site: str) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for info in sorted(Path(site).glob("*.dist-info")):
        found.setdefault(_normal(info.name.partition("-")[0]), []).append(info)
    return found


@functools.lru_cache(maxsize=64)
def _by_top_level(site: str) -> dict[str, list[Path]]:
    """Distributions by the top-level names that they install, which may differ (``yaml``) or be shared (``google``).

    Reads all records.
    """
    found: dict[str, list[Path]] = {}
    for info in (info for infos in _distributions(site).values() for info in infos):
        for top in {re.split("[/.,]", line, maxsplit=1)[0] for line in _lines(info)}:
            found.setdefault(top, []).append(info)
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _hash_files(file: str | None) -> str:
    """The identity of a package without a record: its files by name and size, small ones at its top by content, too.

    ``__version__`` is not used: a process that has not imported the package yet would have another key.
    """
    if file is None:
        return ""
    path, digest = Path(file), hashlib.sha256()
    package = path.parent if path.name.startswith("__init__.") else path
    with contextlib.suppress(OSError):
        for inner in sorted(package.rglob("*")) if package.is_dir() else [path]:
            if inner.is_file() and "__pycache__" not in inner.parts:
                size, is_outer = inner.stat().st_size, inner == path or inner.parent == package
                digest.update(f"{inner.relative_to(package.parent)}:{size}\n".encode())
                digest.update(inner.read_bytes() if is_outer and size <= _MOST_READ else b"")
    return digest.hexdigest()[:16]
