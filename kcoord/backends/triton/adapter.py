"""Triton's kernels and C modules, each as a `Backend`. Triton runs a compile itself, between `begin` and `finish`."""

from __future__ import annotations

import hashlib
import os
import shutil
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget as TritonTarget
from triton.compiler import ASTSource

from kcoord.artifacts.local import Artifact
from kcoord.backends.backend import Backend
from kcoord.backends.triton import GROUP, MODULES, OWN_KEY, base32, launchers, recipes
from kcoord.backends.triton.inputs import kernel_content
from kcoord.backends.triton.request import Kernel, Module, purpose
from kcoord.backends.triton.tools import PACKAGE
from kcoord.backends.triton.variables import VARIABLES
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget
from kcoord.keys.host import host_abi
from kcoord.keys.packages import label_of
from kcoord.keys.tools import record
from kcoord.packs.recipe import TRIED, Recipe
from kcoord.rank.coordinator import Request


class TritonBackend(Backend[Kernel, dict[str, str]]):
    """A handle is the dictionary of a kernel's files, by name: Triton loads them, and keeps its own kernels in memory."""

    name = "triton"
    variables = VARIABLES
    keeps_handles = False

    def bypass(self, request: Kernel) -> str:
        """A kernel that Triton must compile, or whose IR is not the one in its key."""
        if request.problem:
            return request.problem
        knobs = triton.knobs
        if knobs.compilation.override or getattr(request.options, "ir_override", None):
            return "its IR is overridden"
        return "TRITON_ALWAYS_COMPILE is set" if knobs.compilation.always_compile else ""

    def label(self, request: Kernel) -> str:
        return request.name

    def key(self, request: Kernel) -> CacheKey:
        """Triton's own key, with the inputs that it leaves open folded in by `kcoord.backends.triton.folding`."""
        return CacheKey.of(self.name, request.name, **{OWN_KEY: request.digest})

    def target(self, request: Kernel) -> GPUTarget | None:
        target = request.triton_target
        if target is None:
            return None
        arch = str(getattr(request.options, "arch", target.arch)).removeprefix(
            "sm"
        )  # TRITON_OVERRIDE_ARCH chooses another
        return GPUTarget(target.backend, int(arch) if arch.isdecimal() else arch, target.warp_size)

    def device(self, request: Kernel) -> DeviceKey | None:
        return None  # asking initializes CUDA, after which no forked child can use the GPU

    def adjust(self, request: Kernel, wanted: Request) -> Request:
        """In Triton's own layout. While another rank compiles, this one builds the launcher."""
        return wanted._replace(
            home=request.home,
            explain=lambda: self._details(request),
            while_waiting=lambda: launchers.begin(request.source, request.triton_target),
        )

    def _details(self, request: Kernel) -> dict[str, Any]:
        """The parts of Triton's key."""
        source, options = request.source, request.options
        function = getattr(source, "fn", None)
        found: dict[str, Any] = {"triton": triton.__version__, "target": str(self.target(request) or "")}
        if function is not None:
            found["source"] = function.cache_key  # has the lines where the functions begin
            found["first line"] = function.starting_line_number
            found["signature"] = {str(k): str(v) for k, v in source.signature.items()}
            found["constants"] = {_name(function, k): str(v) for k, v in source.constants.items()}
            found["attributes"] = {_name(function, k): str(v) for k, v in source.attrs.items()}
        if options is not None:
            found["options"] = {k: str(v) for k, v in vars(options).items() if k != "extern_libs"}
        for inputs in request.inputs[:1]:
            helpers = [each for each in inputs.functions if each is not function]
            found |= {f"first line of {label_of(each.fn)}": each.starting_line_number for each in helpers}
            found |= inputs.details()
        return found

    def required(self, request: Kernel) -> Collection[str]:
        return request.files

    def unchanged(self, request: Kernel) -> bool:
        libraries_moved = request.options is not None and request.options.hash() not in request.text
        return not libraries_moved and all(each.hold() for each in request.inputs)

    def load(self, request: Kernel, artifact: Artifact) -> dict[str, str]:
        root = str(artifact.path)
        return {f.name: f"{root}/{f.name}" for f in artifact.manifest.files if not f.name.startswith(GROUP)}

    def recipe(self, request: Kernel, seconds: float) -> Recipe | None:
        order = time.monotonic_ns() + (TRIED if purpose.tries else 0)
        return recipes.recipe_of(request.source, request.triton_target, request.options, seconds, order)

    def replay(self, recipe: Recipe, target: GPUTarget | None, waits: bool) -> str:
        return recipes.replay(recipe, target, waits)

    def trial(self) -> int:
        @triton.jit
        def nothing():  # type: ignore[no-untyped-def]
            pass

        has_nvidia = "nvidia" in triton.backends.backends
        target = TritonTarget("cuda", 90, 32) if has_nvidia else TritonTarget("hip", "gfx942", 64)
        triton.compile(ASTSource(nothing, {}, {}, {}), target=target)
        return 1


def _name(function: Any, path: Any) -> str:
    """Constants are keyed by a path into the arguments, which starts with an argument's position."""
    try:
        return ".".join([function.arg_names[path[0]], *map(str, path[1:])])
    except (TypeError, IndexError):
        return str(path)


class TritonModules(Backend[Module, str]):
    """A handle is the path of the library."""

    name = MODULES
    keeps_handles = False
    aside = True  # a summary that counted modules would contradict Triton's listener

    def label(self, request: Module) -> str:
        return request.filename

    def key(self, request: Module) -> CacheKey:
        """Not Triton's own key, which has the answer of the program ``file``. No compiler's content: an image may have none."""
        compilers = {name: os.environ.get(name) for name in ("CC", "CXX")}
        factors = _build_factors(request.build) if "src" in request.build else {"triton_key": request.digest}
        return CacheKey.of(self.name, request.filename, **factors, compilers=compilers, **host_abi())

    def borrowed(self, request: Module, key: CacheKey) -> str:
        compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")  # as Triton finds it
        return Path(compiler).name if compiler and record.read(compiler) else ""

    def device(self, request: Module) -> DeviceKey | None:
        return None

    def adjust(self, request: Module, wanted: Request) -> Request:
        return wanted._replace(home=request.cache / base32(wanted.key.digest))

    def required(self, request: Module) -> tuple[str, ...]:
        return (request.filename,)

    def load(self, request: Module, artifact: Artifact) -> str:
        return str(artifact.path / request.filename)


_DRIVERS = {"cuda", "libcuda.so.1"}


def _build_factors(build: Mapping[str, Any]) -> dict[str, Any]:
    """The driver's library is the same wherever a machine has it. Triton's headers count by its version."""
    source, libraries, builder = build["src"], build.get("libraries") or [], triton.knobs.build
    places = {"include": build.get("include_dirs"), "custom": sorted(builder.backend_dirs)}
    linked = [flag for flag in build.get("ccflags") or [] if str(flag).startswith(("-l", "-Wl,"))]
    if linked or not set(libraries) <= _DRIVERS:
        places["library"] = build.get("library_dirs")
    return {
        "source": hashlib.sha256(source if isinstance(source, bytes) else source.encode()).hexdigest(),
        "flags": [build.get("language", "c"), libraries, build.get("ccflags") or []],
        "places": {n: [str(p).replace(str(PACKAGE), "triton") for p in paths or []] for n, paths in places.items()},
        "triton": triton.__version__,
        "builder": None if builder.impl is None else kernel_content(builder.impl).factors(),
    }


backend = TritonBackend()
modules = TritonModules()
