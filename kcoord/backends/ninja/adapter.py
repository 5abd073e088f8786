"""C++ and CUDA libraries that ninja builds while the job runs, as a `Backend`.

Their builders let the first process of a directory build, behind a lock: torch's has no owner, so that the next job waits for
ever if the builder is killed; others hold on one host only. Here every build has a directory of its own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import UNLOADED, Backend
from kcoord.backends.ninja import extensions
from kcoord.backends.ninja.request import Library
from kcoord.keys.device import DeviceKey, GPUTarget, Scope
from kcoord.keys.host import cpu_features, host_abi
from kcoord.keys.tools.commands import VARIABLES
from kcoord.packs.recipe import Recipe

_MODULE = "torch.utils.cpp_extension"


class NinjaBackend(Backend[Library, Any]):
    """A handle is what the builder returns: a module, or a path."""

    name = "ninja"
    variables = VARIABLES
    scope = Scope.TARGET
    keeps_handles = False  # each call imports a module anew, as without kcoord

    def label(self, request: Library) -> str:
        return request.name

    def factors(self, request: Library) -> Mapping[str, Any]:
        inputs = request.inputs
        return {
            "build": inputs.text,
            "files": inputs.files,
            "abi": host_abi(),
            "cpu": cpu_features() if inputs.is_native else (),
            **request.factors(),
        }

    def tools(self, request: Library) -> Collection[str]:
        return request.inputs.tools

    def device(self, request: Library) -> DeviceKey | None:
        return None  # for the host, and for the GPUs that the flags name

    def compile(self, request: Library, staging: Path) -> Any:
        with tempfile.TemporaryDirectory(prefix="build-", dir=staging) as directory:
            request.build(Path(directory))
            shutil.copyfile(Path(directory, request.file), staging / request.file)
        return UNLOADED

    def required(self, request: Library) -> tuple[str, ...]:
        return (request.file,)

    def unchanged(self, request: Library) -> bool:
        return request.unchanged()

    def load(self, request: Library, artifact: Artifact) -> Any:
        return request.load(artifact.path)

    def recipe(self, request: Library, seconds: float) -> Recipe | None:
        """None for a library that is no extension of torch, and for sources that are gone or too large."""
        if not isinstance(request, extensions.Extension):
            return None
        call = {**request.arguments, "is_python_module": request.is_python_module}
        try:
            call["sources"] = [_source(Path(path), request.place) for path in request.arguments["sources"]]
        except OSError:
            return None
        return Recipe.of(self.name, _MODULE, request.name, call, None, seconds)

    def replay(self, recipe: Recipe, target: GPUTarget | None, waits: bool) -> str:
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
            return self.prepare(request, waits)


def _source(path: Path, place: Path) -> tuple[str, bytes | None]:
    """Its path; its name and content if it lies in `place`."""
    return (path.name, path.read_bytes()) if path.parent == place else (str(path), None)


backend = NinjaBackend()
