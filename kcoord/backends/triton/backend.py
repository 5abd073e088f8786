"""Triton as a `Backend`: kernels, whose compile Triton runs itself between `begin` and `finish`.

Launchers and the CLI use this module where Triton is not installed: it imports Triton inside its steps only.
"""

from __future__ import annotations

import base64
import sys
import time
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kcoord.artifacts.local import Artifact
from kcoord.backends.base import Backend
from kcoord.backends.triton.variables import VARIABLES
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget
from kcoord.packs.recipe import TRIED, Recipe
from kcoord.settings import Settings

if TYPE_CHECKING:
    from kcoord.backends.triton.inputs import Inputs

MANAGER = "kcoord.backends.triton.cache_manager:TritonCacheManager"
GROUP = "__grp__"
"""Prefix of the file in which Triton lists a kernel's files."""
OLDEST = (3, 4)
MODULES = "triton-module"
"""The name of `kcoord.backends.triton.modules.TritonModules`, the backend of the C modules that Triton builds."""
_OWN_KEY = "triton_key"


def base32(digest: str) -> str:
    """A hash in hex, as Triton names directories by it."""
    return base64.b32encode(bytes.fromhex(digest)).decode().rstrip("=")


def hexadecimal(name: str) -> str:
    """The hash that `base32` made `name` of; empty if it made it of none."""
    try:
        return base64.b32decode(name + "=" * (-len(name) % 8)).hex()
    except ValueError:
        return ""


class Kernel(NamedTuple):
    """One compile, as Triton's `compile` has it in its local variables. `digest` is Triton's key, `home` its directory.

    `problem`: why `digest` does not hold all inputs. `inputs` are as they were when the key was made, and `text` is what Triton
    made it of; `files` are the names that Triton stored.
    """

    name: str
    digest: str
    home: Path
    source: Any
    triton_target: Any
    options: Any
    problem: str = ""
    inputs: tuple[Inputs, ...] = ()
    text: str = ""
    files: tuple[str, ...] = ()


class TritonBackend(Backend[Kernel, dict[str, str]]):
    """A handle is the dictionary of a kernel's files, by name: Triton loads them, and keeps its own kernels in memory."""

    name = "triton"
    modules = ("triton",)
    packages = MappingProxyType({"triton": OLDEST, "torch": (2, 8)})
    recipes = ("triton",)
    variables = VARIABLES
    keeps_handles = False

    def hook(self) -> None:
        if "triton.runtime.jit" in sys.modules:
            import_module("kcoord.backends.triton.cache_manager").hook()

    def obstacle(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        manager = environ.get("TRITON_CACHE_MANAGER") or MANAGER
        if manager == MANAGER:
            return None
        return f"TRITON_CACHE_MANAGER={manager} is set", "unset it: kcoord leaves Triton to it"

    def child_environ(self, settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
        directory = environ.get("TRITON_CACHE_DIR") or str(settings.local_dir / self.name)
        return {"TRITON_CACHE_MANAGER": MANAGER, "TRITON_CACHE_DIR": directory}

    def tiers(self, environ: Mapping[str, str]) -> dict[str, Path]:
        chosen = environ.get("TRITON_CACHE_DIR")
        return {"TRITON_CACHE_DIR": Path(chosen)} if chosen else {}

    def bypass(self, request: Kernel) -> str:
        """Triton must compile, or takes another IR than the one that its key holds."""
        from triton import knobs

        if request.problem:
            return request.problem
        if knobs.compilation.override or getattr(request.options, "ir_override", None):
            return "its IR is overridden"
        return "TRITON_ALWAYS_COMPILE is set" if knobs.compilation.always_compile else ""

    def label(self, request: Kernel) -> str:
        return request.name

    def key(self, request: Kernel) -> CacheKey:
        """Triton's own key, with the inputs that it leaves open folded in by `kcoord.backends.triton.folding`."""
        return CacheKey.of(self.name, request.name, **{_OWN_KEY: request.digest})

    def target(self, request: Kernel) -> GPUTarget | None:
        target = request.triton_target
        return GPUTarget(target.backend, target.arch, target.warp_size) if target is not None else None

    def device(self, request: Kernel) -> DeviceKey | None:
        return None  # asking initializes CUDA, after which no forked child can use the GPU

    def details(self, request: Kernel) -> dict[str, Any]:
        """The parts of Triton's key."""
        import triton

        source, options = request.source, request.options
        function = getattr(source, "fn", None)
        found: dict[str, Any] = {"triton": triton.__version__, "target": str(self.target(request) or "")}
        if function is not None:
            found["source"] = function.cache_key
            found["signature"] = {str(k): str(v) for k, v in source.signature.items()}
            found["constants"] = {_name(function, k): str(v) for k, v in source.constants.items()}
            found["attributes"] = {str(k): str(v) for k, v in source.attrs.items()}
        if options is not None:
            found["options"] = {k: str(v) for k, v in vars(options).items() if k != "extern_libs"}
        for inputs in request.inputs[:1]:
            found |= inputs.details()
        return found

    def home(self, request: Kernel, key: CacheKey) -> Path:
        return request.home

    def place(self, key: CacheKey) -> str | None:
        """The place below the directory that `child_environ` gives Triton. A factor's text counts only if it has its digest."""
        if key.backend == MODULES:
            return f"{self.name}/{base32(key.digest)}"
        stated = next((f.text for f in key.factors if f.name == _OWN_KEY), None)
        if key.backend != self.name or stated is None:
            return None
        return (
            f"{self.name}/{stated}"
            if key.digest == CacheKey.of(self.name, key.name, **{_OWN_KEY: stated}).digest
            else None
        )

    def required(self, request: Kernel) -> Collection[str]:
        return request.files

    def unchanged(self, request: Kernel) -> bool:
        libraries_moved = request.options is not None and request.options.hash() not in request.text
        return not libraries_moved and all(each.hold() for each in request.inputs)

    def load(self, request: Kernel, artifact: Artifact) -> dict[str, str]:
        root = str(artifact.path)
        return {f.name: f"{root}/{f.name}" for f in artifact.manifest.files if not f.name.startswith(GROUP)}

    def meanwhile(self, request: Kernel) -> None:
        from kcoord.backends.triton import launchers

        launchers.begin(request.source, request.triton_target)

    def recipe(self, request: Kernel, seconds: float) -> Recipe | None:
        from kcoord.backends.triton.recipes import recipe_of, trying

        order = time.monotonic_ns() + (TRIED if trying.active else 0)
        return recipe_of(request.source, request.triton_target, request.options, seconds, order)

    def replay(self, recipe: Recipe, target: GPUTarget | None, waits: bool) -> str:
        import_module("triton")  # first: once it is there the hook imports the module below
        return str(import_module("kcoord.backends.triton.recipes").replay(recipe, target, waits))


def _name(function: Any, path: Any) -> str:
    """Constants are keyed by a path into the arguments, which starts with an argument's position."""
    try:
        return ".".join([function.arg_names[path[0]], *map(str, path[1:])])
    except (TypeError, IndexError):
        return str(path)
