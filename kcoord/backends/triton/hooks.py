"""Hooks Triton once it is imported."""

from __future__ import annotations

import sys

from kcoord.backends import abandoned_frames
from kcoord.backends.fail_open import coordinator_in_use, notices
from kcoord.backends.triton import OLDEST
from kcoord.backends.wrapping import is_wrapped
from kcoord.rank.directories import watch_temporary_directories


def hook() -> None:
    """Wrap `compile` wherever Triton keeps it, complete its keys, keep its hash of itself, and share autotuners' choices.

    Idempotent. Nothing happens to another package of this name, nor to a version that is not supported, nor if kcoord is off.
    """
    coordinator = coordinator_in_use() if "triton.runtime.jit" in sys.modules and supported() else None
    if coordinator is None:
        return
    import triton.compiler
    import triton.compiler.compiler

    from kcoord.backends.triton import (  # not before: they import parts that another version lacks
        autotune,
        folding,
        own_key,
    )

    for namespace in (triton.compiler.compiler, triton.compiler, triton):
        if not is_wrapped(namespace.compile):
            namespace.compile = abandoned_frames.wrap(namespace.compile)
    folding.hook()
    watch_temporary_directories()
    own_key.hook(coordinator.settings.local_dir)
    own_key.hook_libraries(coordinator.settings.local_dir)
    autotune.hook()


def supported() -> bool:
    """True if this Triton has the interface that this adapter was written for. A notice names an older one, once."""
    found = sys.modules["triton"].__version__
    version = tuple(int("".join(filter(str.isdigit, part)) or 0) for part in found.split(".")[:2])
    if version < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        notices.tell(f"Triton {found} is older than {oldest}: kcoord leaves it alone; upgrade Triton to use it")
    return version >= OLDEST
