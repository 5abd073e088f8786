"""A traced module of FlyDSL, and its recipe: the module, and how it was compiled. Enough to compile it without the script."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kcoord.backends.flydsl import llvm_options
from kcoord.keys.device import GPUTarget
from kcoord.packs.recipe import Recipe


@dataclass(frozen=True)
class Traced:
    """A traced module, and how it is to be compiled.

    `ir` is its text, without source lines unless these are compiled into the code. `compile` runs FlyDSL's compiler on it.
    """

    module: Any = field(repr=False)
    ir: str = field(repr=False)
    arch: str
    function: str
    links: tuple[str, ...]
    hints: Mapping[str, Any]
    compile: Callable[[], Any] = field(repr=False)


def recipe_of(request: Traced, target: GPUTarget | None, seconds: float) -> Recipe | None:
    """None for a module that is too large, or that was compiled with what no recipe holds."""
    if llvm_options.factors():
        return None
    call = {"ir": zlib.compress(request.ir.encode()), "arch": request.arch, "hints": dict(request.hints)}
    return Recipe.of("flydsl", "flydsl", request.function, call, target, seconds)


@contextmanager
def request_of(recipe: Recipe) -> Iterator[Traced]:
    """The request, in a context and with the hints of its compile. Raises MLIR's exceptions for a module of another release."""
    from flydsl._mlir import ir
    from flydsl.compiler.jit_function import CompilationContext, MlirCompiler

    call, text = recipe.call, zlib.decompress(recipe.call["ir"]).decode()
    with ir.Context() as context, CompilationContext.compile_hints(call["hints"]):
        context.enable_multithreading(False)
        context.load_all_available_dialects()
        module = ir.Module.parse(text)
        native = MlirCompiler.compile.__wrapped__
        yield Traced(
            module=module,
            ir=text,
            arch=call["arch"],
            function=recipe.qualname,
            links=(),
            hints=call["hints"],
            compile=lambda: native(MlirCompiler, module, arch=call["arch"], func_name=recipe.qualname),
        )
