"""A CuTe DSL kernel's recipe: its traced module and its passes. Enough to compile it without the script."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import zstandard

from kcoord.backends.cutedsl.native import NativeCompile
from kcoord.packs.recipe import Recipe

if TYPE_CHECKING:
    from kcoord.backends.cutedsl.backend import Traced
    from kcoord.keys.device import GPUTarget


_LEVEL = 12
"""A kernel of FlashAttention-4 has 0.8 MB of text, and a recipe 64 KiB: zlib's 79 KB would not fit, these 52 KB do."""


def recipe_of(request: Traced, target: GPUTarget | None, seconds: float) -> Recipe | None:
    """None for a module that is too large."""
    text = zstandard.ZstdCompressor(_LEVEL).compress(request.ir.encode())
    call = {"ir": text, "pipeline": request.pipeline}
    return Recipe.of("cutedsl", "cutlass", request.name, call, target, seconds)


@contextmanager
def request_of(recipe: Recipe) -> Iterator[Traced]:
    """The request, in a context of its own. Raises MLIR's exceptions for a module of another release."""
    from cutlass._mlir import ir, passmanager
    from cutlass.base_dsl.compiler import Compiler

    from kcoord.backends.cutedsl.backend import Traced

    text = zstandard.ZstdDecompressor().decompress(recipe.call["ir"]).decode()
    pipeline = recipe.call["pipeline"]
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        given = {"self": Compiler(passmanager, None), "module": module, "pipeline": pipeline}
        yield Traced(module, recipe.qualname, text, pipeline, {}, NativeCompile(Compiler.compile.__wrapped__, given))
