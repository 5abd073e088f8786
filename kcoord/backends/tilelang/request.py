"""A request for a traced kernel of TileLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kcoord.keys.cache_key import CacheKey


@dataclass(frozen=True)
class Kernel:
    """A traced kernel, and how it is to be compiled: TileLang's own arguments, resolved.

    `cache` is TileLang's cache of this kind of kernel, whose methods write and read the files. `key` is known if the cache asks.
    """

    cache: Any = field(repr=False)
    function: Any = field(repr=False)
    execution: str
    target: Any
    host: Any
    out_idx: Any
    pass_configs: Mapping[str, Any]
    flags: Any
    context: Any = field(default=None, repr=False)
    verbose: bool = False
    key: CacheKey | None = None
