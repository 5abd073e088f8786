"""Warm-up: the ranks of a job compile a recorded profile's keys together, before they need them.

The way of a profile: `profile_access` decides where a process may read it, `tasks` turns each recipe into a task for each GPU,
and `runner` walks them in the order of `kcoord.packs.order`, which deals them out to the ranks.

The package is callable: ``kcoord.warmup("NAME")`` is `kcoord.warmup.runner.warmup`.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """The imported package hides the function of the same name in `kcoord`, so it must be callable itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from kcoord.warmup.runner import warmup

        return warmup(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
