"""Hooking the compilers of this process, and of every process below it."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Any

from kcoord.backends.base import notices
from kcoord.settings import Settings

TRITON_MANAGER = "kcoord.backends.triton:TritonCacheManager"


def install() -> list[str]:
    """Hook the compilers of this process, those imported already and those imported later; idempotent.

    Returns the names of the backends that are hooked: none under ``KCOORD_DISABLE=1``. Raises `SettingsError` if a setting
    cannot be used. Not touched: a cache manager of your own (a warning says so).
    """
    settings = Settings.from_environ()
    if settings.disable:
        return []
    found = triton_environment(settings, os.environ)
    os.environ.update(found)
    if "TRITON_CACHE_MANAGER" not in found:
        return []
    if "triton.runtime.cache" in sys.modules:
        import_module("kcoord.backends.triton").hook()
    return ["triton"]


def triton_environment(settings: Settings, environ: Any) -> dict[str, str]:
    """The variables by which every Triton below this environment finds kcoord; empty if another manager is set."""
    manager = environ.get("TRITON_CACHE_MANAGER") or TRITON_MANAGER
    if manager != TRITON_MANAGER:
        notices.tell(f"TRITON_CACHE_MANAGER={manager} is set: kcoord leaves Triton to it; unset it to use kcoord")
        return {}
    default = str(settings.local_dir / "triton")
    return {
        "TRITON_CACHE_MANAGER": TRITON_MANAGER,
        "TRITON_CACHE_DIR": environ.get("TRITON_CACHE_DIR") or default,
    }
