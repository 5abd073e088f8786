"""A library's recipe: the import path of its ``premake``, and its configurations. ``make`` is given objects, and has none."""

from __future__ import annotations

import sys
import tempfile
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING

from kcoord.packs.recipe import Recipe

if TYPE_CHECKING:
    from kcoord.backends.ninetoothed.backend import Library, NineToothedBackend
    from kcoord.keys.device import GPUTarget

_CALL = ("configs", "caller", "kernel_name")


def recipe_of(request: Library, target: GPUTarget | None, seconds: float) -> Recipe | None:
    """None for a `premake` that cannot be imported, or configurations that are no plain values."""
    premake = request.given.get("premake")
    module, qualname = getattr(premake, "__module__", "__main__"), getattr(premake, "__qualname__", "")
    if module == "__main__":
        return None
    call = {name: request.given[name] for name in _CALL}
    return Recipe.of("ninetoothed", module, qualname, call, target, seconds)


def replay(backend: NineToothedBackend, recipe: Recipe, waits: bool) -> str:
    """As `Backend.replay`. The library's files are shared, and lie in no directory of a user."""
    import ninetoothed  # noqa: F401 - hooks it

    from kcoord.backends.ninetoothed import hooks

    premake = attrgetter(recipe.qualname)(import_module(recipe.module))
    with tempfile.TemporaryDirectory(prefix="kcoord-ninetoothed-") as place:
        native = sys.modules["ninetoothed.build"].build.__wrapped__
        request = hooks.library_of(native, premake, output_dir=place, **recipe.call)
        if request is None:
            raise ValueError(f"{recipe.qualname} cannot be built here: kcoord is off")
        return backend.prepare(request, waits)
