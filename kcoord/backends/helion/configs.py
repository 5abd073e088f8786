"""Configurations that Helion's searches found: the first rank whose search has ended decides for all; nobody waits for it.

Helion asks its cache before a search, and gives it what the search has found. It does not ask again: ranks that searched side
by side take the configuration that was given first, which is returned in place of their own.

Helion's key leaves out the kernel's helpers and globals. The content of the function is added to it, so that Helion's own files
are kept by it, too: a kernel that was tuned without kcoord is tuned once more.

Not shared: kernels with a process group, whose ranks must search together; and searches that were told to ask no cache.
"""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from helion.autotuner.remote_cache import RemoteCacheBackend
from helion.runtime.config import Config

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.wrapping import wraps
from kcoord.errors import KeyFactorError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import Scope, current_device
from kcoord.keys.function.walk import content_of
from kcoord.keys.packages import identity_of

_PACKAGES = ("helion", "torch", "triton")


@dataclass
class _Search:
    """A search that is shared. `decided` is the configuration of the job, as Helion keeps it; None until there is one."""

    key: CacheKey
    begun: float
    decided: str | None = None


class _UnderWay(threading.local):
    search: _Search | None = None


_under_way = _UnderWay()


class SharedConfigs(RemoteCacheBackend):  # type: ignore[misc]
    """For ``HELION_REMOTE_CACHE_BACKEND``. It knows the search that it is asked for by `_under_way`."""

    @fails_open(lambda *arguments: None)
    def get(self, key: str) -> str | None:
        search, coordinator = _under_way.search, coordinator_in_use()
        content = coordinator.choices.get(search.key) if coordinator is not None and search is not None else None
        return None if content is None or _config(content) is None else content.decode()

    @fails_open(lambda *arguments: None)
    def put(self, key: str, data: str) -> None:
        search, coordinator = _under_way.search, coordinator_in_use()
        if coordinator is not None and search is not None:
            seconds = time.perf_counter() - search.begun
            decided = coordinator.choices.offer(search.key, data.encode(), seconds, str(current_device()))
            search.decided = None if decided is None else decided.decode()


def agreeing(native: Callable[..., Any]) -> Callable[..., Any]:
    """`native` is ``AutotuneCacheBase.autotune``."""

    @wraps(native)
    def autotune(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _under_way.search  # a kernel's baseline may be another kernel, which is tuned meanwhile
        _under_way.search = search = None if kwargs.get("skip_cache") else _search(self)
        try:
            config = native(self, *args, **kwargs)
        finally:
            _under_way.search = before
        return config if search is None or search.decided is None else _config(search.decided.encode()) or config

    return autotune


@fails_open(lambda cache: None)
def _search(cache: Any) -> _Search | None:
    """None if the search is not shared: then Helion keeps its end by its own key."""
    kernel = cache.kernel
    if not isinstance(getattr(cache, "_backend", None), SharedConfigs) or coordinator_in_use() is None:
        return None
    if kernel.env.process_group_name is not None:
        return None
    function = kernel.kernel.fn
    try:
        content = content_of(function).factors()
    except KeyFactorError as error:
        notices.tell(f"{function.__qualname__} is tuned by each rank for itself: {error}")
        return None
    key = CacheKey.of(
        "helion-autotune",
        function.__qualname__,
        native=cache._get_cache_key().stable_hash(),  # shapes, the GPU, the space that is searched
        effort=kernel.settings.autotune_effort,
        function=content,
        packages=[identity_of(package) for package in _PACKAGES],
    ).on(current_device(), Scope.MODEL)
    cache.key = dataclasses.replace(cache.key, extra_cache_key=key.digest)
    return _Search(key, time.perf_counter())


def _config(content: bytes) -> Any:
    """None if `content` is no configuration. Other ranks' content is untrusted."""
    try:
        return Config.from_json(json.loads(content)["config"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        let_through(error)
        return None
