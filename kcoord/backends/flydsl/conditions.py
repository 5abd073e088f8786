"""Compiles that are not shared, and why; and FlyDSL's own cache, pickles that are read before the hook.

Before 0.5 its key leaves out attributes of global objects, lists in closures and helpers of other directories, and is made for
the GPU of a function's first call: that cache is off while kcoord shares. It stays as the user set it by
``FLYDSL_RUNTIME_ENABLE_CACHE``, where nothing is shared, and in a process that fills ``FLYDSL_RUNTIME_CACHE_DIR`` for others
(``COMPILE_ONLY``). ``FLYDSL_RUNTIME_RUN_ONLY`` reads it in any case. From 0.5 on it keys traces, and is left on.
"""

from __future__ import annotations

import os
import re
from typing import Any

KEYS_ITS_TRACES = (0, 5)
"""The first release whose own cache does."""
_SWITCH = "FLYDSL_RUNTIME_ENABLE_CACHE"
"""Set by users to switch FlyDSL's own cache on or off."""
_DIRECTORY = "FLYDSL_RUNTIME_CACHE_DIR"
_LINKS = re.compile(r"\brocdl-attach-target\{[^}]*\bl=")
_SHOWN = ("dump_ir", "dump_asm", "print_origin_ir", "print_after_all")


def links(pipeline: str) -> bool:
    """True if libraries of device code are linked."""
    return _LINKS.search(pipeline) is not None


def of_user() -> str:
    """The setting by which the user keeps compiles in this process or gives them to other tools; empty if there is none."""
    from flydsl.utils import env

    if env.compile.llvm_dir.strip():
        return "FLYDSL_COMPILE_LLVM_DIR names another LLVM, whose files are in no key"
    if _SWITCH in os.environ and not env.runtime.enable_cache:
        return f"{_SWITCH} is off"
    for name in _SHOWN:
        if getattr(env.debug, name, False):
            return f"{env.debug.options[name].env_var} shows each compile"
    return ""


class _Switch:
    """FlyDSL's setting, off unless the user has set it. Each launch reads it, and a script may assign to it."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def __get__(self, settings: Any, kind: Any = None) -> Any:
        return self._native if settings is None else _SWITCH in os.environ and self._native.__get__(settings, kind)


def switch_off_own_cache(env: Any) -> None:
    """`env` is FlyDSL's module of settings. Where it fills a directory, or another compiler runs, it stays as it is."""
    fills = _DIRECTORY in os.environ and env.compile.compile_only
    is_elsewhere = env.compile.llvm_dir.strip() or os.environ.get("FLYDSL_COMPILE_BACKEND", "rocm") != "rocm"
    if not (fills or is_elsewhere):
        kind = type(env.runtime)
        kind.enable_cache = _Switch(vars(kind)["enable_cache"])
