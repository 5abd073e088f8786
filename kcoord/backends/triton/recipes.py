"""A Triton kernel's recipe: where its function is, and how it was specialized. Enough to compile it without the script.

A recipe names what to compile; its key is computed anew where it is replayed, so a profile outlives a change of Triton, of the
kernel's source and, with another target, of the GPU. Options are kept only where they differ from the target's defaults.

`recipes_of` lists the compiles that an autotuner's measurements will begin: announced, they are done at once by the node's pool.
Without that, ranks that tune in step compile one configuration after another. A configuration's signature and constants follow
from its launch, which Triton itself runs here up to the place where it looks into its cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import triton
from triton.backends.compiler import GPUTarget as TritonTarget
from triton.compiler.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction

from kcoord.backends.triton import launchers
from kcoord.backends.triton.request import Settled, purpose
from kcoord.backends.triton.script import Unreplayable as Unreplayable
from kcoord.backends.triton.script import kernel_of_script
from kcoord.interruption import let_through
from kcoord.keys.device import GPUTarget
from kcoord.keys.function.callables import jit_function
from kcoord.packs.recipe import MOST_AT_ONCE, TRIED, Recipe

_SCALARS = (type(None), bool, int, float, str)


def recipe_of(source: Any, target: Any, options: Any, seconds: float, order: int) -> Recipe | None:
    """The recipe of a compile; None if it could not be replayed: the kernel cannot be imported, or a constant is not plain."""
    function = getattr(source, "fn", None)
    if type(source) is not ASTSource or not isinstance(function, JITFunction):
        return None
    try:
        module, qualname = _place(function)
        constants = [[list(path), _plain(value)] for path, value in source.constants.items()]
        chosen = _chosen(target, options)
    except Unreplayable:
        return None
    call = {
        "signature": dict(source.signature),
        "constants": constants,
        "attributes": [[list(path), value] for path, value in source.attrs.items()],
        "options": chosen,
    }
    return Recipe.of("triton", module, qualname, call, f"{target.backend}:{target.arch}", seconds, order)


def replay(recipe: Recipe, target: GPUTarget | None, waits: bool) -> str:
    """Compile `recipe`, unless it is there (``loaded``) or, without `waits`, another rank is at it (``busy``).

    Raises the exceptions of the import and of the compile, and `Unreplayable`.
    """
    function = _resolve(recipe.module, recipe.qualname)
    if target is None:
        raise Unreplayable(f"{recipe.qualname}: its recipe names no GPU")
    call = recipe.call
    constants = {tuple(path): _value(value) for path, value in call["constants"]}
    attributes = {tuple(path): value for path, value in call["attributes"]}
    missing = set(call["signature"]) ^ {p.name for p in function.params}
    if missing:
        raise Unreplayable(f"its parameters are others now: {', '.join(sorted(missing))}")
    source = ASTSource(function, call["signature"], constants, attributes)
    there = TritonTarget(target.backend, target.arch, target.warp_size)
    with purpose.being(replays=True, waits=waits):
        try:
            triton.compile(source, target=there, options=dict(call["options"]))
            how = "compiled"
        except Settled as settled:
            how = settled.how
    if how != "busy":
        launchers.build(source, there, waits)
    return how


def _place(function: Any) -> tuple[str, str]:
    module, qualname = function.fn.__module__, function.fn.__qualname__
    if sys.modules.get(module) is None:  # another module of this name must not be run in the middle of a job
        raise Unreplayable(f"{module} was not imported under this name")
    if _attribute(sys.modules[module], module, qualname) is not function:
        raise Unreplayable(f"{module}.{qualname} is another kernel")
    return module, qualname


def _resolve(module: str, qualname: str) -> Any:
    if module == "__main__":
        return _kernel(kernel_of_script(qualname), module, qualname)
    return _attribute(import_module(module), module, qualname)


def _attribute(found: Any, module: str, qualname: str) -> Any:
    if "<locals>" in qualname:
        raise Unreplayable(f"{module}.{qualname} cannot be imported: move it out of the function")
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return _kernel(found, module, qualname)


def _kernel(found: Any, module: str, qualname: str) -> Any:
    function = jit_function(found)
    if not isinstance(function, JITFunction):
        raise Unreplayable(f"{module}.{qualname} is no kernel")
    return function


def _chosen(target: Any, options: Any) -> dict[str, Any]:
    """The options that differ from the target's defaults."""
    backend = make_backend(target)
    defaults = vars(backend.parse_options({}))
    chosen = {name: _plain(value) for name, value in vars(options).items() if defaults.get(name) != value}
    if backend.parse_options(dict(chosen)).hash() != options.hash():
        raise Unreplayable("its options are more than their names and values")
    return chosen


def _plain(value: Any) -> Any:
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(_plain(v) for v in value)
    if isinstance(value, triton.language.dtype):
        return {"dtype": str(value)}
    if isinstance(value, triton.language.constexpr):
        return {"constexpr": _plain(value.value)}
    if isinstance(value, JITFunction):
        return {"function": list(_place(value))}
    raise Unreplayable(f"a constant of type {type(value).__name__}")


def _value(plain: Any) -> Any:
    if isinstance(plain, tuple):
        return tuple(_value(p) for p in plain)
    if not isinstance(plain, dict):
        return plain
    ((kind, inner),) = plain.items()
    if kind == "dtype":
        return triton.language.dtype(inner)
    return triton.language.constexpr(_value(inner)) if kind == "constexpr" else _resolve(*inner)


def recipes_of(launches: Sequence[Callable[[], object]]) -> list[Recipe]:
    """The recipes of the compiles that ``launch()`` would begin; none for a kernel that is in memory, or cannot be imported.

    Their orders are the launches' numbers, from `TRIED` on.
    """
    found = []
    for order, launch in enumerate(launches[:MOST_AT_ONCE], TRIED):
        try:
            with purpose.being(lists=True):
                launch()
        except Settled as settled:
            wanted = settled.compile
            recipe = recipe_of(wanted.get("src"), wanted.get("target"), wanted.get("options"), 0.0, order)
            if recipe is None:
                return []  # nor the others
            found.append(recipe)
        except Exception as error:  # noqa: BLE001 - the tuner meets it, too, when it measures
            let_through(error)
            return found
    return found
