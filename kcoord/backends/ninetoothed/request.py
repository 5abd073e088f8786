"""Requests for libraries, of a call and of a recipe: the import path of a ``premake``, and its configurations.

``make`` is given objects, and has no recipe.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.backends.ninetoothed import traces
from kcoord.backends.ninetoothed.gpus import Gpu
from kcoord.backends.ninetoothed.recording import Premake
from kcoord.keys.device import GPUTarget
from kcoord.packs.recipe import Recipe

_CALL = ("configs", "caller", "kernel_name")


@dataclass(eq=False)
class Library:
    """A library to build. `output` is the directory that the user named; `given` are the arguments of ``build`` or ``make``.

    ``compile(directory, records)`` is NineToothed's, into another directory; it records in `records` what it traces. Steps note
    `traces` and `gpu`, which are in the key, and `made`: digests of the traces that were compiled.
    """

    name: str
    output: Path
    given: Mapping[str, Any]
    trace: Callable[[], list[dict[str, Any]]]
    compile: Callable[[Path, Path], Any]
    traces: list[dict[str, Any]] = field(default_factory=list)
    gpu: Gpu | None = None
    made: set[str] = field(default_factory=set)


@fails_open(lambda *arguments: None)
def library_of(
    given: Mapping[str, Any], trace: Callable[[], list[dict[str, Any]]], compile: Callable[[Path, Path], Any]
) -> Library | None:
    """None if kcoord is off, or NineToothed is to say itself that something is wrong."""
    name, output = given["kernel_name"], given["output_dir"]
    if coordinator_in_use() is None or not isinstance(name, str) or output is None or not Path(output).is_dir():
        return None
    return Library(name, Path(output), given, trace, compile)


def of_build(native: Any, premake: Any, configs: Any, **kwargs: Any) -> Library | None:
    """The request of these arguments of `build`, which `native` is. None as for `library_of`."""
    bound = inspect.signature(native).bind(premake, configs, **kwargs)
    bound.apply_defaults()
    given = {**bound.arguments, "caller": bound.arguments["caller"] or "cuda"}

    def compile(directory: Path, records: Path) -> Any:
        return native(Premake(premake, records), configs, **{**kwargs, "output_dir": directory})

    return library_of(given, lambda: traces.of_build(sys.modules[native.__module__], given), compile)


def recipe_of(request: Library, target: GPUTarget | None, seconds: float) -> Recipe | None:
    """None for a `premake` that cannot be imported, or configurations that are no plain values."""
    premake = request.given.get("premake")
    module, qualname = getattr(premake, "__module__", "__main__"), getattr(premake, "__qualname__", "")
    if module == "__main__":
        return None
    call = {name: request.given[name] for name in _CALL}
    return Recipe.of("ninetoothed", module, qualname, call, target, seconds)


@contextmanager
def request_of(recipe: Recipe) -> Iterator[Library]:
    """The request, whose files are shared, and lie in no directory of a user. Raises ValueError if kcoord is off."""
    premake = attrgetter(recipe.qualname)(import_module(recipe.module))
    with tempfile.TemporaryDirectory(prefix="kcoord-ninetoothed-") as place:
        native = sys.modules["ninetoothed.build"].build.__wrapped__
        request = of_build(native, premake, output_dir=place, **recipe.call)
        if request is None:
            raise ValueError(f"{recipe.qualname} cannot be built here: kcoord is off")
        yield request
