"""Triton's key of itself and of the libraries that launches link, computed once per machine.

Triton hashes some 500 MB of its own files in every process, 0.3 to 1.1 s, in order to notice that it was changed. Here one
process of a machine does it, with Triton's function; the others compare the files' stamps (`kcoord.keys.tools.machine_cache`).
The value is always Triton's.

Triton hashes a library that a launch links (``extern_libs``) once per process, by its path. Here its content counts as it is now.

Triton's function also imports the packages that it walks. ``import triton`` has imported all of them already (3.4 to 3.9).
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import inspect
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton

from kcoord.backends.fail_open import fails_open
from kcoord.backends.reliances import release_of, stand_aside
from kcoord.backends.triton import version_of
from kcoord.keys.tools.machine_cache import cached, is_settled
from kcoord.keys.tools.toolchain import fingerprint
from kcoord.keys.tools.tree import listing_of

_HOMES = ("triton.runtime.cache", "triton.compiler.compiler")  # from 3.5; in 3.4
_LINKERS = {"triton.backends.nvidia.compiler": (3, 4), "triton.backends.amd.compiler": (3, 9)}
"""By module, the first release whose key holds the content of libraries. Before it holds their paths."""
_libraries: dict[str, str] = {}
"""The libraries that Triton has hashed in this process, few, by path; and their hashes when launches looked last."""
_IMPORTERS = ("triton.runtime.autotuner", "torch._inductor.runtime.triton_compat")


def home() -> Any:
    """The module of Triton that has `triton_key`; None if none has."""
    return next((m for m in map(importlib.import_module, _HOMES) if hasattr(m, "triton_key")), None)


def hook(local_dir: Path) -> None:
    """Replace Triton's `triton_key` wherever it was imported to. Idempotent; nothing happens to one that is not Triton's own.

    `local_dir` is `Settings.local_dir`. Whatever goes wrong later, the stock function answers.
    """
    place = home()
    if place is None:
        stand_aside("triton", release_of("triton"), "hash of Triton", "triton_key differs")
        return
    stock = getattr(place.triton_key, "__kcoord_stock__", place.triton_key)
    computes = inspect.unwrap(stock)
    if getattr(computes, "__qualname__", "") != "triton_key" or computes.__module__ != place.__name__:
        return  # a stand-in: its answer must not be kept for others
    if place.triton_key is stock:
        if hasattr(stock, "cache_info") and stock.cache_info().currsize:
            return  # Triton has hashed itself in this process, before kcoord was imported, and remembers it
        place.triton_key = _kept(stock, local_dir)
    for name in _IMPORTERS:
        importer = sys.modules.get(name)
        if importer is not None and getattr(importer, "triton_key", None) is stock:
            vars(importer)["triton_key"] = place.triton_key


def hook_libraries(local_dir: Path) -> None:
    """Replace Triton's `file_hash`, by which its key holds the libraries of a launch, in the same way."""
    for backend, since in _LINKERS.items():
        compiler: Any = sys.modules.get(backend) if version_of(triton.__version__) >= since else None
        if compiler is not None and not hasattr(compiler, "file_hash"):
            stand_aside("triton", release_of("triton"), "hashes of libraries", f"{backend}.file_hash differs")
        elif compiler is not None and not hasattr(compiler.file_hash, "__kcoord_stock__"):
            vars(compiler)["file_hash"] = _hashing(compiler.file_hash, local_dir)


def _hashing(stock: Callable[[str], str], local_dir: Path) -> Callable[[str], str]:
    @fails_open(stock)
    @functools.wraps(stock)
    def file_hash(path: str) -> str:
        found = fingerprint(path, local_dir)
        _libraries.setdefault(path, "" if found is None else found.sha256)
        return stock(path) if found is None else found.sha256

    file_hash.__kcoord_stock__ = stock  # type: ignore[attr-defined]
    return file_hash


def libraries_moved(local_dir: Path) -> bool:
    """True if a library has changed since the last call, or since Triton hashed it first."""
    now = {path: "" if (found := fingerprint(path, local_dir)) is None else found.sha256 for path in list(_libraries)}
    moved = any(_libraries[path] != sha256 for path, sha256 in now.items())
    _libraries.update(now)
    return moved


def _kept(stock: Callable[[], str], local_dir: Path) -> Callable[[], str]:
    computes = inspect.unwrap(stock)  # past its own memory: a value of earlier is not kept under the stamps of now

    @functools.lru_cache
    @fails_open(stock)
    @functools.wraps(computes)
    def triton_key() -> str:
        return once(computes, Path(triton.__file__).parent, local_dir)

    triton_key.__kcoord_stock__ = stock  # type: ignore[attr-defined]
    return triton_key


def once(computes: Callable[[], str], package: Path, local_dir: Path) -> str:
    """``computes()``, or its value in another process of this machine that had the same files in `package`."""
    now, files = (
        time.time_ns(),
        listing_of(str(package), ("*.py", "*.so")),
    )  # more than Triton hashes: all of its Python
    # the version in memory enters Triton's key, too, and so does how this interpreter names a library
    inputs = triton.__version__, sysconfig.get_config_var("EXT_SUFFIX"), files
    stamps = hashlib.sha256(repr(inputs).encode()).hexdigest()

    def recall(entry: Any) -> str | None:
        return str(entry[1]) if entry[0] == stamps else None

    def find(_: Any) -> tuple[str, Any]:
        key = computes()
        settled = all(stamp is None or is_settled(stamp, now) for _, _, stamp in files)
        return key, [stamps, key] if settled else None

    where = hashlib.sha256(os.fsencode(package)).hexdigest()[:32]
    return cached(local_dir, f"triton-{where}", recall, find)
