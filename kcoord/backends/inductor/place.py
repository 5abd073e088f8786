"""Torch's own cache directories, which kcoord sets: if their disk is full, torch writes where it would without kcoord."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.inductor import CACHE
from kcoord.default_dir import takes_libraries
from kcoord.interruption import let_through

_LEAST_ROOM = 4 << 20  # bytes that a disk must have free for a compile to begin there


@fails_open(lambda: None)
def look() -> None:
    """Call it before torch compiles. Not guaranteed: that the disk has room until the end of the compile."""
    directory = _ours(CACHE)
    if directory is not None and not takes_libraries(directory, _LEAST_ROOM):
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        os.environ[CACHE] = default_cache_dir()
        notices.tell(f"{directory}: its disk takes no files: torch keeps what it compiles in {os.environ[CACHE]}")


def emitted(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``TritonBundler.read_and_emit``; None, and kernels are compiled, if the disk refuses them."""
    try:
        return native(*args, **kwargs)
    except OSError as error:
        let_through(error)
        if _ours("TRITON_CACHE_DIR") is None:
            raise
        notices.tell(f"the kernels of a graph are compiled again: {error}", about="bundled kernels")
        return None


@fails_open(lambda name: None)
def _ours(name: str) -> Path | None:
    """The directory of the variable `name`, if kcoord chose it."""
    coordinator, directory = coordinator_in_use(), Path(os.environ.get(name) or "/")
    return directory if coordinator is not None and directory.is_relative_to(coordinator.settings.local_dir) else None
