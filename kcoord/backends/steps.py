"""The steps of a compiler's adapter, small and overridable. `kcoord.backends.base.Backend` calls them on the way of a request."""

from __future__ import annotations

import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from kcoord.artifacts.local import Artifact
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, current_device
from kcoord.keys.environment import Environment
from kcoord.keys.tools.toolchain import tool_factors, tools
from kcoord.keys.tools.tree import tree_factors
from kcoord.profiles.recipe import Recipe
from kcoord.rank.connect import connect
from kcoord.settings import Settings

R = TypeVar("R")
H = TypeVar("H")

UNLOADED: Any = object()
"""Returned by `Steps.compile` if it built no handle: the published artifact is loaded."""


class Steps(ABC, Generic[R, H]):
    """A compiler as its adapter describes it. `R` is a request as its hook sees it, `H` the handle that callers get: a loaded
    kernel. Each step but `label` and `load` has a default.
    """

    name: ClassVar[str]
    """Of its keys, recipes and statistics: lower-case letters, digits, ``_`` and ``-``."""
    modules: ClassVar[tuple[str, ...]] = ()
    """`hook` is called once each of these is imported; none: there is nothing to hook."""
    packages: ClassVar[Mapping[str, tuple[int, ...]]] = {}
    """Distributions that it needs, and the oldest version of each, for ``kcoord doctor``."""
    recipes: ClassVar[tuple[str, ...]] = ()
    """Kinds of recipes that `replay` takes; none: it cannot replay."""
    variables: ClassVar[Mapping[str, str]] = {}
    """Variables of the environment that change what it generates, and how. They are in the default key."""
    scope: ClassVar[Scope] = Scope.DEVICE
    """How much of the device is in the default key."""
    keeps_handles: ClassVar[bool] = True
    """False: each request loads anew, because the compiler has a memory of its own."""
    explicit: ClassVar[bool] = False
    """True: the caller uses kcoord by name, so errors of keys, settings, publishing and loading are raised to it."""

    aside: ClassVar[bool] = False
    """True: its artifacts are no kernels of the job, and are in no figure."""

    # Steps: this process and its children.

    def hook(self) -> None:
        """Hook the compiler, which this process has imported. Idempotent."""

    def obstacle(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """Why this environment keeps it from being hooked, and the remedy; None if nothing does."""
        return None

    def child_environ(self, settings: Settings, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Variables by which the compiler in a child process finds kcoord. Called where the compiler may not be installed."""
        return {}

    def tiers(self, environ: Mapping[str, str]) -> Mapping[str, Path]:
        """Directories outside `Settings.local_dir` that its artifacts lie in, by the variable that chooses them."""
        return {}

    # Steps: the key of a request.

    def bypass(self, request: R) -> str:
        """Why `request` must not be shared; empty if it may be."""
        return ""

    @abstractmethod
    def label(self, request: R) -> str:
        """The kernel's name, for people."""

    def factors(self, request: R) -> Mapping[str, Any]:
        """Everything else that the compiled bytes depend on. Raises `KeyFactorError` for a value without identity."""
        return {}

    def tools(self, request: R) -> Mapping[str, str] | Iterable[str]:
        """Programs that it runs and libraries that it links, as names on PATH or paths. They are keyed by content."""
        return ()

    def trees(self, request: R) -> Iterable[str]:
        """Directories of files that it reads: headers, templates. They are keyed by content."""
        return ()

    def target(self, request: R) -> GPUTarget | None:
        """The GPU to compile for; None: the current device's. Artifacts that record another one are refused."""
        return None

    def device(self, request: R) -> DeviceKey | None:
        """The device that handles belong to; None if the compiler must not be asked for it: then no handle is kept."""
        device, target = current_device(), self.target(request)
        return device if target is None else replace(device, target=target)

    def key(self, request: R) -> CacheKey:
        """The key, of the steps above. Override it only for a compiler whose own key is complete."""
        local_dir = connect().settings.local_dir
        factors = dict(self.factors(request))
        if self.variables:
            factors["env"] = self._environment.read()
        if found := tools(self.tools(request), local_dir):
            factors |= tool_factors(found)
        if trees := tree_factors(self.trees(request), local_dir):
            factors["trees"] = trees
        key, device = CacheKey.of(self.name, self.label(request), **factors), self.device(request)
        return key if device is None else key.on(device, self.scope)

    @functools.cached_property
    def _environment(self) -> Environment:
        return Environment(self.variables)

    def alias(self, request: R) -> CacheKey | None:
        """A cheap key that stands for `key`, if that costs a trace: it is computed once for each alias, in the whole job.

        An alias must hold whatever the trace depends on: it is the promise that equal aliases have equal keys.
        """
        return None

    def details(self, request: R) -> Mapping[str, Any]:
        """Explanations of a factor that is itself a hash; recorded, and not in the digest."""
        return {}

    # Steps: the artifact.

    def home(self, request: R, key: CacheKey) -> Path:
        """The artifact's directory in the local tier; override it, and `place`, for a compiler with a layout of its own."""
        return connect().home(key.digest)

    def place(self, key: CacheKey) -> str | None:
        """The part of `home` below `Settings.local_dir`, of the verified key alone; None: `key` is not this backend's, or it has
        no layout of its own. An artifact that is fetched before its request is put there, and nowhere else.
        """
        return None

    def compile(self, request: R, staging: Path) -> H:
        """Compile, write the artifact's files into `staging`, and return the handle, or `UNLOADED`.

        Raises the compiler's own exceptions. Not called for hooks that use `begin` and `finish`.
        """
        raise NotImplementedError(f"{self.name} compiles between begin and finish")

    def lower_caches(self, key: CacheKey) -> contextlib.AbstractContextManager[object]:
        """Entered around `compile`: switch off the compiler's own caches below the hook, or key them by ``key.digest``.

        Without it, a "compile" may publish a stale file of such a cache under a fresh key.
        """
        return contextlib.nullcontext()

    def required(self, request: R) -> Collection[str]:
        """Names of files without which an artifact is neither published nor loaded."""
        return ()

    def unchanged(self, request: R) -> bool:
        """False if an input has changed since the key was made: the compile may have read either value, and is not shared."""
        return True

    @abstractmethod
    def load(self, request: R, artifact: Artifact) -> H:
        """The handle of an artifact. Must not write into ``artifact.path``."""

    def meanwhile(self, request: R) -> None:
        """Called once if the request waits for another rank. Must return at once."""

    # Steps: recipes.

    def recipe(self, request: R, seconds: float) -> Recipe | None:
        """The recipe of a request whose compile took `seconds`; None if it cannot be replayed."""
        return None

    def is_portable(self, recipe: Recipe) -> bool:
        """False if a recipe holds for its own GPU only."""
        return True

    def replay(self, recipe: Recipe, target: GPUTarget | None, waits: bool) -> str:
        """Compile `recipe` for `target`, or for the current device: ``compiled``, ``loaded`` or, without `waits`, ``busy``.

        Raises the exceptions of the import and of the compile. `prepare` does it for a request.
        """
        raise NotImplementedError(f"{self.name} has no recipes")
