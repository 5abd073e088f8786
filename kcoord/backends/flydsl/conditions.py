"""Compiles that are not shared, and why."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kcoord.backends.flydsl.backend import Traced

SWITCH = "FLYDSL_RUNTIME_ENABLE_CACHE"
"""The user's word on FlyDSL's own cache."""
_SHOWN = ("dump_ir", "dump_asm", "print_origin_ir", "print_after_all")
_TRACED = "fly_ktrace."
_KTRACE = "ktrace numbers its events in this process"
ENVIRONMENT = ("FLYDSL_COMPILE_BACKEND", "FLYDSL_COMPILE_LLVM_DIR", "FLYDSL_KTRACE_ENABLE")
"""The variables of `of_environment`."""


def against(request: Traced) -> str:
    """Why `request` must not be shared; empty if it may be."""
    if request.links:
        return "it links libraries that its trace only names"
    if request.fixed not in ("", request.arch):
        return f"its jit function was first called for {request.fixed}, and FlyDSL keeps what it makes as such"
    if _TRACED in request.ir:
        return _KTRACE
    return of_environment() or _of_user()


def of_environment() -> str:
    """Why nothing that this process compiles is shared; empty if it may be."""
    from flydsl.compiler import backends
    from flydsl.utils import env

    if env.compile.llvm_dir.strip():
        return "FLYDSL_COMPILE_LLVM_DIR names another LLVM, whose files are in no key"
    if getattr(getattr(env, "ktrace", None), "enable", False):  # not in 0.3
        return _KTRACE
    name = backends.compile_backend_name()
    kind = backends._registry.get(name)
    if kind is None or kind.__module__ != "flydsl.compiler.backends.rocm":
        return f"FlyDSL's backend {name!r} is not its own"
    return ""


def _of_user() -> str:
    """Why the user wants a compile to take place in this process; empty if nothing says so."""
    from flydsl.utils import env

    if SWITCH in os.environ and not env.runtime.enable_cache:
        return f"{SWITCH} is off"
    for name in _SHOWN:
        if getattr(env.debug, name, False):
            return f"{env.debug.options[name].env_var} shows each compile"
    return ""
