"""TileLang's own cache of nvcc's output. Its key holds neither compilers nor templates: it is left out of shared compiles."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _Compiling(threading.local):
    """`active` while this thread compiles a kernel that is to be published."""

    active = False


_compiling = _Compiling()


@contextmanager
def left_out() -> Iterator[None]:
    """A block in which the cache neither answers this thread nor keeps its files."""
    before, _compiling.active = _compiling.active, True
    try:
        yield
    finally:
        _compiling.active = before


def hook(cache: Any) -> None:
    """Hook the class `cache`, TileLang's ``CUDABinaryCache``."""
    load, save = cache.load, cache.save

    @functools.wraps(load)
    def load_if_asked(*args: Any, **kwargs: Any) -> Any:
        return None if _compiling.active else load(*args, **kwargs)

    @functools.wraps(save)
    def save_if_asked(*args: Any, **kwargs: Any) -> Any:
        return None if _compiling.active else save(*args, **kwargs)

    cache.load, cache.save = load_if_asked, save_if_asked
