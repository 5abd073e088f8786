"""A traced module of CuTe DSL, CuTe DSL's own compile of it, and its recipe: enough to compile it without the script."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import zstandard

from kcoord.keys.device import GPUTarget
from kcoord.packs.recipe import Recipe

_LEVEL = 12
"""A kernel of FlashAttention-4 has 0.8 MB of text, and a recipe 64 KiB: zlib's 79 KB would not fit, these 52 KB do."""
AFTERWARDS = "_post_compile_hook"


class NativeCompile:
    """Runs the passes, which change the module in place, and so at most once.

    `Compiler.compile` then calls the compiler's hook for compiled modules, which adds functions for TVM FFI that only the
    caller's process can describe. It is left out here.
    """

    def __init__(self, compile: Callable[..., Any], given: Mapping[str, Any]) -> None:
        """`given` are the arguments of `compile`, by name, with ``self``."""
        self._compile, self._given = compile, given
        self.is_done = False

    def __call__(self) -> Any:
        if not self.is_done:
            compiler = copy.copy(self._given["self"])
            setattr(compiler, AFTERWARDS, None)
            self._compile(**{**self._given, "self": compiler})
            self.is_done = True
        return self._given["module"]


@dataclass(frozen=True)
class Traced:
    """A traced module, which a compile or a load turns into the compiled one, in place.

    `name` is that of the host's function. `pipeline` is the passes with all options, and `ir` the text that they read: with
    source lines if these are compiled into the code. `diagnostics` are the arguments by which the caller asks for warnings and
    remarks.
    """

    module: Any = field(repr=False)
    name: str
    ir: str = field(repr=False)
    pipeline: str
    diagnostics: Mapping[str, Any]
    compile: NativeCompile = field(repr=False)


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

    text = zstandard.ZstdDecompressor().decompress(recipe.call["ir"]).decode()
    pipeline = recipe.call["pipeline"]
    with ir.Context(), ir.Location.unknown():
        module = ir.Module.parse(text)
        given = {"self": Compiler(passmanager, None), "module": module, "pipeline": pipeline}
        yield Traced(module, recipe.qualname, text, pipeline, {}, NativeCompile(Compiler.compile.__wrapped__, given))
