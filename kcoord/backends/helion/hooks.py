"""Helion's autotuner, hooked where it asks its cache of configurations, and at its end.

Helion documents such a cache for several hosts, which is `kcoord.backends.helion.configs` unless the user has named one.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

from kcoord.backends.reliances import Part
from kcoord.rank.directories import inherit_temporary

_AUTOTUNE = "autotuner.base_cache:AutotuneCacheBase.autotune"
TUNING = Part("helion", "helion", "tuning", {
    _AUTOTUNE: "self skip_cache=",
    "autotuner.base_cache:CacheKeyBase.stable_hash": "self",
    "autotuner.local_cache:LocalAutotuneCache._get_cache_key": "self",
    "autotuner.remote_cache:RemoteAutotuneCache.get": "self",
    "autotuner.remote_cache:RemoteAutotuneCache.put": "self _",
    "autotuner.remote_cache:RemoteCacheBackend.get": "self key",
    "autotuner.remote_cache:RemoteCacheBackend.put": "self key data",
    "runtime.config:Config.from_json": "_ _",
})  # fmt: skip
OURS = {
    "HELION_AUTOTUNE_CACHE": "RemoteAutotuneCache",
    "HELION_REMOTE_CACHE_BACKEND": "kcoord.backends.helion.configs.SharedConfigs",
}
_CANDIDATES = "helion_autotune_"


def hook() -> None:
    """Idempotent."""
    directory = os.environ.get("TRITON_CACHE_DIR", "")
    if multiprocessing.parent_process() is not None and Path(directory).name.startswith(_CANDIDATES):
        inherit_temporary(directory)  # a worker of a search, which measures candidates
    if not TUNING.holds():
        return
    from kcoord.backends.helion import configs  # it imports names of Helion's that not every release has

    TUNING.wrap(_AUTOTUNE, configs.agreeing)
    if not any(map(os.environ.get, OURS)):
        os.environ.update(OURS)
