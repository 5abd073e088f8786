"""Whose code a module is, and the version of what is installed.

A project's own functions are keyed by content. What is installed (``site-packages``) or belongs to Python is keyed by name:
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
import re
import sys
import types
from pathlib import Path
from typing import Any

_NOT_FOLLOWED = frozenset(("kcoord", "torch", "triton"))
"""Nobody's project, also when used from a checkout: torch and Triton are too large, and say their versions; what waits for a
compile changes nothing of it."""
_SITE = frozenset(("site-packages", "dist-packages"))


class Owner(enum.Enum):
    PROJECT = "project"
    INSTALLED = "installed"
    PYTHON = "python"


_NAMELESS = "<none>"
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class that was made by a ``class`` statement, or as if


def module_of(thing: Any) -> str:
    """The name of the module that a function or a class belongs to; ``<none>``, which is the project's, if it has none.

    Code that is executed in a namespace without a ``__name__`` makes functions of no module, and classes that claim to be of
    ``builtins``.
    """
    module = getattr(thing, "__module__", None)
    if isinstance(thing, types.FunctionType):
        return module if isinstance(module, str) and "__name__" in thing.__globals__ else _NAMELESS
    if isinstance(thing, type):
        if not isinstance(module, str):
            return _NAMELESS
        if module == "builtins" and thing.__flags__ & _HEAP_TYPE:
            return module if getattr(builtins, thing.__qualname__, None) is thing else _NAMELESS
        return module
    return module if isinstance(module, str) and module else "builtins"


@functools.lru_cache(maxsize=4096)
def owner_of(module: str) -> Owner:
    """Whose code `module` is, by its name and file. A module without a file, made by ``exec``, is the project's."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "builtins":
        return Owner.PYTHON
    if top in _NOT_FOLLOWED:
        return Owner.INSTALLED
    directory = _site_of(_file_of(module) or _file_of(top))
    return Owner.PROJECT if directory is None else Owner.INSTALLED


def portable_name(module: str) -> str:
    """The name that `module` has when it is imported: ``python train.py`` and ``import train`` are the same code.

    A child that `multiprocessing` spawns has the script under a third name.
    """
    if module not in ("__main__", "__mp_main__"):
        return module
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "__mp_main__"):
        name: str = spec.name
        return name.removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else "__main__"


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
    recorded = _record(directory, top) if directory is not None else ""
    if not recorded:  # an installer that keeps no record, or a distribution of another name
        version = getattr(sys.modules.get(top), "__version__", "")
        recorded = f"{version if isinstance(version, str) else ''} {_file_hash(file)}"
    return f"{top} {recorded}"


def _file_of(module: str) -> str | None:
    """Where a module comes from; a top-level one need not be imported for that."""
    found: Any = sys.modules.get(module)
    if found is None and "." not in module:
        with contextlib.suppress(ValueError, ImportError):
            found = importlib.util.find_spec(module)
            file = getattr(found, "origin", None)
            return file if file else next(iter(getattr(found, "submodule_search_locations", None) or ()), None)
    file = getattr(found, "__file__", None)
    return file if file else next(iter(getattr(found, "__path__", None) or ()), None)  # a namespace package


def _site_of(file: str | None) -> Path | None:
    """The directory that a package was installed into."""
    return next((p for p in Path(file).parents if p.name in _SITE), None) if isinstance(file, str) else None


def _record(site: Path, top: str) -> str:
    """Version and the hashes in RECORD, without what differs between installations of one wheel (bytecode, metadata)."""
    wanted = _normal(top)
    for info in _distributions(str(site)).get(wanted, ()):
        try:
            lines = (info / "RECORD").read_text().splitlines()
        except OSError:
            continue
        kept = sorted(
            line for line in lines if ",sha256=" in line and ".dist-info/" not in line and ".pyc," not in line
        )
        if kept:
            version = info.name.removesuffix(".dist-info").partition("-")[2]
            return f"{version} {hashlib.sha256(chr(10).join(kept).encode()).hexdigest()[:16]}"
    return ""


@functools.lru_cache(maxsize=64)
def _distributions(site: str) -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for info in Path(site).glob("*.dist-info"):
        found.setdefault(_normal(info.name.partition("-")[0]), []).append(info)
    return found


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _file_hash(file: object) -> str:
    try:
        return hashlib.sha256(Path(str(file)).read_bytes()).hexdigest()[:16]
    except OSError:
        return ""
