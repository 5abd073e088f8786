"""FlyDSL's own cache: pickles that are read before the hook. It is off while kcoord shares kernels.

Its key leaves out attributes of global objects, lists in closures and helpers of other directories, and is made for the GPU of a
function's first call. It stays as the user set it by ``FLYDSL_RUNTIME_ENABLE_CACHE``, where nothing is shared, and in a process
that fills ``FLYDSL_RUNTIME_CACHE_DIR`` for others (``COMPILE_ONLY``). ``FLYDSL_RUNTIME_RUN_ONLY`` reads it in any case.
"""

from __future__ import annotations

import os
from typing import Any

from kcoord.backends.fail_open import fails_open, notices
from kcoord.backends.flydsl import conditions
from kcoord.backends.flydsl.conditions import SWITCH
from kcoord.keys.environment import Environment

_DIRECTORY = "FLYDSL_RUNTIME_CACHE_DIR"
_environment = Environment((SWITCH, _DIRECTORY, "COMPILE_ONLY", *conditions.ENVIRONMENT))


class _Switch:
    """FlyDSL's setting, off unless it is wanted. Each launch reads it, and a script may assign to it."""

    def __init__(self, native: Any, env: Any) -> None:
        self._native, self._env = native, env
        self._last: tuple[bytes | None, bool] = None, False

    def __get__(self, settings: Any, kind: Any = None) -> Any:
        if settings is None:
            return self._native
        token = _environment.token()
        last = self._last
        if last[0] != token:
            last = self._last = token, _is_wanted(self._env)
        return last[1] and self._native.__get__(settings, kind)


def switch_off(env: Any) -> None:
    """`env` is FlyDSL's module of settings, which are read live."""
    kind = type(env.runtime)
    kind.enable_cache = _Switch(vars(kind)["enable_cache"], env)
    if not _is_wanted(env):
        if _DIRECTORY in os.environ and not env.runtime.run_only:
            notices.tell(f"{_DIRECTORY} is not used: kcoord shares FlyDSL's kernels; {SWITCH}=1 keeps its own cache on")
    elif SWITCH in os.environ and env.runtime.enable_cache:
        notices.tell(f"{SWITCH} is set: FlyDSL's own cache answers before kcoord, and may be stale")


@fails_open(lambda env: True)
def _is_wanted(env: Any) -> bool:
    """True if FlyDSL's own setting holds."""
    fills = _DIRECTORY in os.environ and env.compile.compile_only
    return SWITCH in os.environ or fills or bool(conditions.of_environment())
