"""A traced kernel of TileLang, and its recipe: its IR, and how it was compiled. Enough to compile it without the script."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import GPUTarget
from kcoord.packs.recipe import Recipe


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


def recipe_of(request: Kernel, label: str, target: GPUTarget | None, seconds: float) -> Recipe | None:
    """None for a kernel that is too large, or whose name no recipe takes."""
    import tvm

    call = {
        "ir": zlib.compress(str(tvm.ir.save_json(request.function)).encode()),
        "execution": request.execution,
        "target": str(request.target),
        "host": None if request.host is None else str(request.host),
        "out_idx": json.dumps(request.out_idx),
        "pass_configs": json.dumps(request.pass_configs),
        "flags": json.dumps(request.flags),
    }
    return Recipe.of("tilelang", "tilelang", label, call, target, seconds)


def request_of(recipe: Recipe) -> Kernel:
    """Raises ValueError for IR of another release, and TileLang's own exceptions."""
    import tvm
    from tilelang import cache
    from tilelang.transform.pass_config import normalize_pass_configs

    call = recipe.call
    target, host = (None if each is None else json.loads(each) for each in (call["target"], call["host"]))
    kind, context, _ = cache._resolve_cache_dispatch(target, host, call["execution"], False)
    return Kernel(
        cache=kind,
        function=tvm.ir.load_json(zlib.decompress(call["ir"]).decode()),
        execution=context.execution_backend.name,
        target=context.target,
        host=context.target_host,
        out_idx=json.loads(call["out_idx"]),
        pass_configs=normalize_pass_configs(json.loads(call["pass_configs"])),
        flags=json.loads(call["flags"]),
        context=context,
    )
