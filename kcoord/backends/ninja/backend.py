"""C++ and CUDA libraries that ninja builds while the job runs, as a `Backend`.

Their builders let the first process of a directory build, behind a lock: torch's has no owner, so that the next job waits for
ever if the builder is killed; others hold on one host only. Here every build has a directory of its own.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kcoord.artifacts.local import Artifact
from kcoord.backends.base import Backend
from kcoord.backends.steps import UNLOADED
from kcoord.keys.device import DeviceKey, GPUTarget, Scope
from kcoord.keys.environment import TOOLCHAIN_VARIABLES
from kcoord.keys.host import cpu_features, host_abi
from kcoord.keys.tools.commands import Inputs
from kcoord.packs.recipe import Recipe


@dataclass(frozen=True)
class Library(ABC):
    """A library to build. `file` is its name in the directory of the build, and in the artifact."""

    name: str
    file: str
    inputs: Inputs = field(repr=False)

    @abstractmethod
    def build(self, directory: Path) -> None:
        """Build `file` in the new `directory`. Raises the builder's own exceptions."""

    @abstractmethod
    def load(self, directory: Path) -> Any:
        """The builder's answer to its caller, for the library in `directory`."""

    def unchanged(self) -> bool:
        """False if the build may have read other inputs than these."""
        return self.inputs.unchanged()

    def factors(self) -> Mapping[str, Any]:
        """Everything that the library depends on beside `inputs`."""
        return {}


class NinjaBackend(Backend[Library, Any]):
    """A handle is what the builder returns: a module, or a path."""

    name = "ninja"
    modules = ("torch.utils.cpp_extension", "flashinfer.jit.core", "tvm_ffi.cpp.extension")
    packages = MappingProxyType({"torch": (2, 8)})
    recipes = ("ninja",)
    variables = TOOLCHAIN_VARIABLES
    scope = Scope.TARGET
    keeps_handles = False  # each call imports a module anew, as without kcoord

    def hook(self) -> None:
        from kcoord.backends.ninja import directories, extensions

        if "torch.utils.cpp_extension" in sys.modules:
            extensions.hook(self)
        directories.hook(self)

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
        from kcoord.backends.ninja import recipes

        return recipes.recipe_of(request, seconds)

    def replay(self, recipe: Recipe, target: GPUTarget | None, waits: bool) -> str:
        from kcoord.backends.ninja import recipes

        return recipes.replay(self, recipe, waits)
