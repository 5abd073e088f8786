"""How a compiler is hooked, and the promise that every hook keeps: it fails open."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from kcoord.settings import Settings
from kcoord.telemetry.events import Notices, log

F = TypeVar("F", bound=Callable[..., Any])

TRITON_MANAGER = "kcoord.backends.triton:TritonCacheManager"

notices = Notices()
"""What the backends of this process have to say, once each."""


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


def fails_open(otherwise: Callable[..., Any]) -> Callable[[F], F]:
    """Wrap a hook so that an error inside kcoord is logged, once, and ``otherwise(*args)`` answers in its place.

    This is the one broad `except` of a rank: an error that nobody foresaw must not fail a training job.
    """

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - see above
                if notices.tell(f"an error in kcoord, please report it: {type(error).__name__}: {error}"):
                    log.warning("where it happened", exc_info=error)
                return otherwise(*args, **kwargs)

        return guarded  # type: ignore[return-value]

    return decorate
