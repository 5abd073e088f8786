"""A TileLang kernel's recipe: its traced IR, and how it was compiled. Enough to compile it without the script."""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING

from kcoord.packs.recipe import Recipe

if TYPE_CHECKING:
    from kcoord.backends.tilelang.backend import Kernel
    from kcoord.keys.device import GPUTarget


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

    from kcoord.backends.tilelang.backend import Kernel

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
