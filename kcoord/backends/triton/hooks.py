"""Hooks Triton once it is imported. The cache manager does so, which ``TRITON_CACHE_MANAGER`` alone brings, too."""

from __future__ import annotations

import sys


def hook() -> None:
    """Idempotent. Nothing happens to a package of this name that is another one."""
    if "triton.runtime.jit" in sys.modules:
        from kcoord.backends.triton import cache_manager  # here, because it imports Triton's parts

        cache_manager.hook()
