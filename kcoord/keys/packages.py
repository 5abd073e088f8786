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
import re
import sys
import types
from pathlib import Path
from typing import Any

_NOT_FOLLOWED = frozenset(("kcoord", "torch", "triton"))
"""Never the project, not even in a checkout: torch and Triton are too large, and state their versions; kcoord does not change
what a compile produces."""
_SITE = frozenset(("site-packages", "dist-packages"))
_GENERATED = "torch._inductor.runtime.compile_tasks"
_MOST_READ = 1 << 20  # bytes
_SCRIPT = re.compile(r"(\.\./)+(bin|Scripts)/")


class Owner(enum.Enum):
    PROJECT = "project"
    INSTALLED = "installed"
    PYTHON = "python"


_NAMELESS = "<none>"
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a ``class`` statement, or like one


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
        if module == "builtins" and thing.__flags__ & _HEAP_TYPE:
            return module if getattr(builtins, thing.__qualname__, None) is thing else _NAMELESS
        return module
    return module if isinstance(module, str) and module else "builtins"


@functools.lru_cache(maxsize=4096)
def owner_of(module: str) -> Owner:
    """The owner of `module`, by its name and file. A module without a file, made by ``exec``, is the project's."""
    top = module.partition(".")[0]
    if top in sys.stdlib_module_names or top == "builtins":
        return Owner.PYTHON
    if top in _NOT_FOLLOWED:
        return Owner.INSTALLED
    directory = _site_of(_file_of(module) or _file_of(top))
    return Owner.PROJECT if directory is None else Owner.INSTALLED


def portable_name(module: str) -> str:
    """The name that `module` has when it is imported: ``python train.py`` and ``import train`` are the same code.

    A child that `multiprocessing` spawns has the script under a third name. Inductor names a module by the hash of its file,
    which contains the index of a GPU.
    """
    if module not in ("__main__", "__mp_main__"):
        return _GENERATED if module.startswith(f"{_GENERATED}.") else module
    main = sys.modules.get("__main__")
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name not in ("__main__", "__mp_main__"):
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
    recorded = _record(directory, top) if directory is not None else ""
    return f"{top} {recorded or _hash_files(file)}"


def _file_of(module: str) -> str | None:
    """The file or directory of a module; a top-level one need not be imported for that."""
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
    """The version and a hash of RECORD, without files that differ between installations of one wheel.

    These are bytecode, metadata and scripts: a script begins with the path of the interpreter that it was installed for.
    """
    versions, recorded = [], []
    for info in _distributions(str(site)).get(_normal(top)) or _by_top_level(str(site)).get(top, []):
        lines = [
            line
            for line in _lines(info)
            if ",sha256=" in line and ".dist-info/" not in line and ".pyc," not in line and not _SCRIPT.match(line)
        ]
        if lines:
            versions.append(info.name.removesuffix(".dist-info").partition("-")[2])
            recorded += lines
    digest = hashlib.sha256("\n".join(sorted(recorded)).encode()).hexdigest()[:16]
    return f"{' '.join(versions)} {digest}" if recorded else ""


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
