"""An extension's recipe: torch's arguments, and the sources that lie in the directory of its build (``load_inline``'s)."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from kcoord.backends.ninja import extensions
from kcoord.packs.recipe import Recipe

if TYPE_CHECKING:
    from kcoord.backends.ninja.backend import Library, NinjaBackend

_MODULE = "torch.utils.cpp_extension"


def recipe_of(request: Library, seconds: float) -> Recipe | None:
    """None for what is no extension of torch, and for sources that are gone or too large."""
    if not isinstance(request, extensions.Extension):
        return None
    call = {**request.arguments, "is_python_module": request.is_python_module}
    try:
        call["sources"] = [_source(Path(path), request.place) for path in request.arguments["sources"]]
    except OSError:
        return None
    return Recipe.of("ninja", _MODULE, request.name, call, None, seconds)


def _source(path: Path, place: Path) -> tuple[str, bytes | None]:
    """Its path; its name and content if it lies in `place`."""
    return (path.name, path.read_bytes()) if path.parent == place else (str(path), None)


def replay(backend: NinjaBackend, recipe: Recipe, waits: bool) -> str:
    """As `Backend.replay`. Raises ValueError for sources, headers or compilers that are not on this machine."""
    with tempfile.TemporaryDirectory(prefix="kcoord-extension-") as place:
        sources = []
        for name, content in recipe.call["sources"]:
            sources.append(name if content is None else str(Path(place, Path(name).name)))
            if content is not None:
                Path(sources[-1]).write_bytes(content)
        request = extensions.request_of({**recipe.call, "sources": sources, "build_directory": place})
        if request is None:
            raise ValueError(
                f"{recipe.qualname} cannot be built here: a source, a header, ninja or a compiler is missing"
            )
        return backend.prepare(request, waits)
