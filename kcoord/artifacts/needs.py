"""Needs of an artifact: versions of this host's libraries without which the artifact's own libraries do not load.

A need is ``libc.so.6 GLIBC_2.34``, a library and a version that it must define, or ``machine 62``, the processor. The dynamic
linker asks the same question as it loads a library.
"""

from __future__ import annotations

import functools
import os
import platform
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from kcoord.artifacts import elf
from kcoord.interruption import let_through

T = TypeVar("T")

NEED = re.compile(r"[\w.+-]{1,128} [\w.+-]{1,128}", re.ASCII)
_MACHINE = "machine"
_RTLD_DI_LINKMAP = 2


def needs_of(read: elf.Read) -> set[str]:
    """Of one file; none unless it is a program or a library for this host's processor. Code for GPUs names another one."""
    machine = elf.machine_of(read)
    if not machine or machine != _machine():
        return set()
    found = {f"{library} {version}" for library, version in elf.needed(read)}
    return {f"{_MACHINE} {machine}", *filter(NEED.fullmatch, found)}


def unmet(needs: Iterable[str]) -> list[str]:
    """The `needs` that this process cannot meet. A library that it neither has loaded nor finds meets all."""
    pairs = [need.partition(" ")[::2] for need in needs]
    versions = {library: _versions_of(library) for library, _ in pairs}
    return [f"{library} {version}" for library, version in pairs if version not in (versions[library] or [version])]


def host_libraries() -> list[str]:
    """The releases of the libraries on which most needs depend: ``["x86_64", "glibc-2.36", "libstdc++.so.6.0.30"]``."""
    path = _path_of("libstdc++.so.6")
    return [platform.machine(), "-".join(platform.libc_ver()), path and Path(path).resolve().name]


def _versions_of(library: str) -> set[str]:
    """The versions that this process's library defines; empty if each will do."""
    if library == _MACHINE:
        return {str(_machine())}
    if path := _path_of(library):
        return _defined(path)  # the dynamic linker accepts a library without versions
    return {"another release"} if _is_loaded_in_another_release(library) else set()


@functools.cache
def _machine() -> int:
    return _asked("/proc/self/exe", elf.machine_of)


@functools.lru_cache(maxsize=256)
def _defined(path: str) -> set[str]:
    return _asked(path, elf.defined)


def _asked(path: str, question: Callable[[elf.Read], T]) -> T:
    """The answer of a file, or that of an empty one if it cannot be opened."""
    try:
        with Path(path).open("rb") as file:
            return question(elf.of_file(file))
    except OSError as error:
        let_through(error)
        return question(elf.of_bytes(b""))


def _path_of(library: str) -> str:
    """The file that the dynamic linker has loaded, or would find; empty if it is not known."""
    if path := _loaded(library):
        return path
    named = os.environ.get("LD_LIBRARY_PATH", "").split(":")
    places = [*filter(None, named), os.path.dirname(_loaded("libc.so.6"))]  # noqa: PTH120
    return next((path for place in places if os.path.exists(path := f"{place}/{library}")), "")  # noqa: PTH110


def _loaded(library: str) -> str:
    """The file of a library that this process has loaded; empty if it has not."""
    try:
        return _file_of(library)
    except (ImportError, OSError, AttributeError) as error:  # AttributeError: a C library without `dlinfo`
        let_through(error)
        return ""


@functools.lru_cache(maxsize=256)
def _file_of(library: str) -> str:
    """As `_loaded`, but raises OSError if it is not loaded, so that only answers are remembered. Loads nothing."""
    import ctypes

    handle = ctypes.CDLL(library, os.RTLD_NOLOAD | os.RTLD_LAZY)._handle
    link = ctypes.POINTER(ctypes.c_void_p * 2)()  # a `struct link_map`, which begins with an address and a name
    if ctypes.CDLL(None).dlinfo(ctypes.c_void_p(handle), _RTLD_DI_LINKMAP, ctypes.byref(link)):
        raise OSError(f"{library} is not known")
    return os.fsdecode(ctypes.string_at(link.contents[1] or b""))


def _is_loaded_in_another_release(library: str) -> bool:
    """True of ``libcudart.so.12`` in a process with ``libcudart.so.13``."""
    name, _, release = library.partition(".so.")
    try:
        return bool(release) and f"/{name}.so." in Path("/proc/self/maps").read_text()
    except OSError as error:
        let_through(error)
        return False
