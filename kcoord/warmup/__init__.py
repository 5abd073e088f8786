"""Many keys over many ranks: what a job compiled, recorded, and compiled again together.

The package is also what users call: ``kcoord.warmup("NAME")`` is `kcoord.warmup.runner.warmup`.
"""

from __future__ import annotations

import sys
import types
from typing import Any


class _Callable(types.ModuleType):
    """A package of this name is in the way of a function of this name, as soon as it is imported: so it is called itself."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from kcoord.warmup.runner import warmup

        return warmup(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
