"""The adapter of one compiler. `Backend` owns the way of a request; a compiler's own class fills in the steps.

A backend shares artifacts that have a key and load again, and nothing else. If something goes wrong inside kcoord, the compiler
answers as without it, and raises its own exceptions.
"""

from __future__ import annotations

import functools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar, cast, final

from kcoord.artifacts.local import Artifact
from kcoord.backends import abandoned_frames
from kcoord.backends.fail_open import fails_open, notices
from kcoord.backends.toolchains import record_toolchain
from kcoord.errors import KeyFactorError, SettingsError, StoreError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, current_device
from kcoord.keys.environment import Environment
from kcoord.keys.tools.toolchain import borrowed_in, tool_factors, tools
from kcoord.keys.tools.tree import tree_factors
from kcoord.packs.automatic import is_automatic
from kcoord.packs.recipe import Recipe
from kcoord.rank.connect import connect
from kcoord.rank.coordinator import ABSENT, Busy, Compilation, Coordinator, Request

R = TypeVar("R")
H = TypeVar("H")

UNLOADED: Any = object()
"""Returned by `Backend.compile` if it built no handle: the published artifact is loaded."""


@dataclass(frozen=True)
class Bypassed:
    """This request is not shared, for `reason`: use the compiler as without kcoord."""

    reason: str


_FAULT = Bypassed("an error in kcoord")


@dataclass(frozen=True)
class _Asked:
    """A request with its identity in this process."""

    coordinator: Coordinator
    key: CacheKey
    device: DeviceKey | None


class Backend(ABC, Generic[R, H]):
    """One compiler. `R` is a request as its hook sees it, `H` the handle that callers get: a loaded kernel.

    A hook calls `obtain` in place of the compiler. If the compiler asks a cache first and stores into it later, its hook calls
    `begin` and `finish`. A process has one instance, which `kcoord.backends.Compiler.backend` names; it is thread-safe if the
    steps are. Each step but `label` and `load` has a default.
    """

    name: ClassVar[str]
    """`Compiler.name`."""
    variables: ClassVar[Mapping[str, str]] = {}
    """Variables of the environment that change what it generates, and how. They are in the default key."""
    scope: ClassVar[Scope] = Scope.DEVICE
    """How much of the device is in the default key."""
    keeps_handles: ClassVar[bool] = True
    """False: each request loads anew, because the compiler has a memory of its own."""
    raises_errors: ClassVar[bool] = False
    """True: the caller uses kcoord by name, so errors of keys, settings, publishing and loading are raised to it."""

    aside: ClassVar[bool] = False
    """True: its artifacts are no kernels of the job, and are in no figure."""

    # Steps: the key of a request.

    def bypass(self, request: R) -> str:
        """The reason why `request` must not be shared; empty if it may be."""
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

    def borrowed(self, request: R, key: CacheKey) -> str:
        """The compilers of this request that are stubs (`kcoord.keys.tools.record`), for people. Then it is only looked up."""
        return borrowed_in(key)

    # Steps: the artifact.

    def adjust(self, request: R, wanted: Request) -> Request:
        """`wanted`, as the coordinator is asked for it. Override it for a layout of the compiler's own.

        It may also add details for ``kcoord explain`` and work to do while another rank compiles.
        """
        return wanted

    def compile(self, request: R, staging: Path) -> H:
        """Compile, write the artifact's files into `staging`, and return the handle, or `UNLOADED`.

        Switch off the compiler's own caches below the hook, or key them by ours: else a stale file of such a cache is published
        under a fresh key. Raises the compiler's own exceptions. Not called for hooks that use `begin` and `finish`.
        """
        raise NotImplementedError(f"{self.name} compiles between begin and finish")

    def required(self, request: R) -> Collection[str]:
        """Names of files without which an artifact is neither published nor loaded."""
        return ()

    def unchanged(self, request: R) -> bool:
        """False if an input on disk is not the one that the key was made of: the compile is not shared."""
        return True

    @abstractmethod
    def load(self, request: R, artifact: Artifact) -> H:
        """The handle of an artifact. Must not write into ``artifact.path``."""

    # Steps: recipes.

    def recipe(self, request: R, seconds: float) -> Recipe | None:
        """The recipe of a request whose compile took `seconds`; None if it cannot be replayed."""
        return None

    def replay(self, recipe: Recipe, target: GPUTarget | None, waits: bool) -> str:
        """Compile `recipe` for `target`, or for the current device: ``compiled``, ``loaded`` or, without `waits`, ``busy``.

        The compiler is imported and hooked. Raises the exceptions of other imports and of the compile. `prepare` does it for a
        request.
        """
        raise NotImplementedError(f"{self.name} has no recipes")

    # Steps: a trial.

    def trial(self) -> int:
        """Let the compiler compile a constant, for a GPU that need not be there, and return how many requests that makes.

        Each request should reach this backend, also in a second call: switch off what the compiler remembers. Called in a process
        of its own (`kcoord.backends.trials`). Raises the compiler's exceptions. 0: there is nothing to try.
        """
        return 0

    # The way of a request.

    @final
    def obtain(self, request: R, native: Callable[[], H]) -> H:
        """The handle of `request`: from memory, loaded, or compiled here. ``native()`` is the compiler as without kcoord.

        It answers if the request is bypassed or has no key, if its artifact does not load, and if kcoord has a fault. Raises
        the exceptions of `compile`, and with `raises_errors` those of `Compilation.run`. Not guaranteed: exactly one compile.
        """
        asked = self._guarded(self._asked, _FAULT)(request)
        if isinstance(asked, Bypassed):
            return native()
        if self.keeps_handles and asked.device is not None:
            handle = asked.coordinator.in_memory(asked.key, asked.device)
            if handle is not ABSENT:
                return cast(H, handle)
        begun = self._guarded(self._begun, _FAULT)(request, asked, True, True)
        handle = ABSENT
        if isinstance(begun, Artifact):
            handle = self._loaded(request, begun)
        elif isinstance(begun, Compilation):
            try:
                handle = self._compiled(request, begun)
            except StoreError as error:  # kcoord's: no disk takes a compiler's files
                let_through(error)
                if self.raises_errors:
                    raise
                notices.tell(f"{error}; kcoord stands aside", about=error.remedy)
        return native() if handle is ABSENT else self._kept(asked, handle)

    @final
    def begin(self, request: R, *, waits: bool = True, loads: bool = True) -> Artifact | Compilation | Busy | Bypassed:
        """The first half of the flow: the artifact to load, or the compile that this rank is to do and to `finish`.

        `BUSY` only without `waits`: another rank compiles it now. `loads` is false if it is only to be on this node.
        """
        asked = self._guarded(self._asked, _FAULT)(request)
        if isinstance(asked, Bypassed):
            return asked
        begun: Artifact | Compilation | Busy | Bypassed = self._guarded(self._begun, _FAULT)(
            request, asked, waits, loads
        )
        return begun

    @final
    def finish(self, request: R, compilation: Compilation) -> Artifact | None:
        """The second half: publish the staged files. None: it is not shared, and its files stay in ``compilation.staging``.

        Raises `ArtifactInvalid` with `raises_errors`, else nothing.
        """
        try:
            published: Artifact | None = self._guarded(self._published, None)(request, compilation)
            return published
        finally:
            if not self.raises_errors and not compilation.ended:
                compilation.use_privately()
            abandoned_frames.unregister(compilation)

    @final
    def prepare(self, request: R, waits: bool) -> str:
        """Have the artifact on this node, unloaded: ``compiled``, ``loaded`` or, without `waits`, ``busy``. For `replay`."""
        found = self.begin(request, waits=waits, loads=False)
        if isinstance(found, Compilation):
            self._compiled(request, found, loads=False)
            return "compiled"
        return "busy" if isinstance(found, Busy) else "loaded"

    @final
    def loaded_natively(self, request: R, saved: float, begun: float) -> None:
        """The compiler's own cache had it: as `Coordinator.loaded_natively`."""
        asked = self._guarded(self._asked, _FAULT)(request)
        if not isinstance(asked, Bypassed):
            asked.coordinator.loaded_natively(asked.key, saved, begun)

    # Its parts.

    def _guarded(self, part: Callable[..., Any], otherwise: Any) -> Callable[..., Any]:
        """`part`, with `otherwise` as its answer after an error, unless errors are the caller's."""
        return part if self.raises_errors else fails_open(lambda *arguments: otherwise)(part)

    def _asked(self, request: R) -> _Asked | Bypassed:
        try:
            reason = self.bypass(request)
            if reason:
                return Bypassed(reason)
            coordinator = connect()
            if not self.raises_errors and coordinator.settings.disable:
                return Bypassed("kcoord is off")
            return _Asked(coordinator, self.key(request), self.device(request))
        except (KeyFactorError, SettingsError) as error:
            if self.raises_errors:
                raise
            if isinstance(error, KeyFactorError):
                notices.tell(f"{self.label(request)} is compiled by each rank for itself: {error}")
            else:
                notices.tell(f"{error}; kcoord stands aside")
            return Bypassed(str(error))

    def _begun(self, request: R, asked: _Asked, waits: bool, loads: bool) -> Artifact | Compilation | Busy:
        coordinator = asked.coordinator
        target = asked.device.target if asked.device is not None else self.target(request)
        missed = False

        def recipe() -> str | None:
            nonlocal missed
            missed = True
            return self._recipe_digest(request)

        home, device = coordinator.home(asked.key.digest), str(asked.device or target or "")
        wanted = self.adjust(
            request, Request(asked.key, home, device, target=target, aside=self.aside, recipe=recipe, loads=loads)
        )
        found = coordinator.request(wanted, wait=waits)
        if isinstance(found, Compilation) and (missing := self.borrowed(request, asked.key)):
            found = self._alone(found, asked.key, missing)
        # an automatic profile lists this node's artifacts since their compiles; a profile that the user named may be newer
        if isinstance(found, Artifact) and (missed or not is_automatic(coordinator.settings.profile)):
            self._record(request, wanted.home, found.manifest.compile_seconds)
        return found

    def _alone(self, compilation: Compilation, asked: CacheKey, missing: str) -> Compilation:
        """The compile for this process alone: with a borrowed compiler it fails, or its output is another's."""
        compilation.give_up()
        if compilation.key.digest == asked.digest:
            there, publisher = f"no {asked.name}", "the compiler"
        else:
            there, publisher = (
                f"one {asked.name}, for other libraries than this host's",
                "the compiler and no newer libraries",
            )
        notices.tell(f"{missing} is borrowed, and the store has {there}: a node with {publisher} must publish it")
        return connect().private(compilation.key, compilation.home, compilation.device)

    def _loaded(self, request: R, artifact: Artifact) -> Any:
        """The handle; `ABSENT` if the artifact does not load."""
        try:
            missing = [name for name in self.required(request) if not (artifact.path / name).is_file()]
            if missing:
                raise FileNotFoundError(f"it has no {', '.join(missing)}")
            return self.load(request, artifact)
        except Exception as error:  # a compiler's loader may raise anything
            let_through(error)
            if self.raises_errors:
                raise
            notices.tell(
                f"{artifact.path} does not load: {type(error).__name__}: {error}; this rank compiles for itself"
            )
            return ABSENT

    def _compiled(self, request: R, compilation: Compilation, loads: bool = True) -> Any:
        """The handle; `ABSENT` if there is none and nothing to load it from."""
        handle, artifact = compilation.run(
            lambda staging: self.compile(request, staging),
            lambda handle: (handle, self.finish(request, compilation)),
            raises_errors=self.raises_errors,
        )
        if handle is not UNLOADED or not loads:
            return handle
        artifact = artifact or fails_open(lambda: None)(compilation.as_artifact)()
        return ABSENT if artifact is None else self._loaded(request, artifact)

    def _kept(self, asked: _Asked, handle: H) -> H:
        if not self.keeps_handles or asked.device is None:
            return handle
        return asked.coordinator.keep_in_memory(asked.key, asked.device, handle)

    def _published(self, request: R, compilation: Compilation) -> Artifact | None:
        missing = [name for name in self.required(request) if not (compilation.staging / name).is_file()]
        if not compilation.shared:
            compilation.use_privately()
        elif not self.unchanged(request):
            compilation.use_privately("an input on disk is not the one that its key was made of")
        elif missing:
            compilation.use_privately(f"its compiler wrote no {', '.join(missing)}")
        else:
            took = time.perf_counter() - compilation.started
            self._record(request, compilation.home, took)  # before publishing, which delivers it
            published = compilation.publish(strict=self.raises_errors)
            record_toolchain(connect(), compilation.key)
            return published
        return None

    @fails_open(lambda self, request: None)
    def _recipe_digest(self, request: R) -> str | None:
        """By it the agent finds the compile time that the job's profile recorded."""
        recipe = self.recipe(request, 0.0) if connect().settings.recorded_as else None
        return None if recipe is None else recipe.digest

    @fails_open(lambda self, *arguments: None)
    def _record(self, request: R, home: Path, seconds: float) -> None:
        """Keep the recipe of a compiled or loaded kernel, if the job records a profile, and has not thrown it away."""
        coordinator = connect()
        if coordinator.settings.recorded_as and not coordinator.throws_away(home):
            recipe = self.recipe(request, seconds)
            if recipe is not None:
                coordinator.record(recipe)
