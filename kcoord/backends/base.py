"""The adapter of one compiler. `Backend` owns the way of a request; a compiler's own class fills in the steps.

A backend shares artifacts that have a key and load again, and nothing else. If something goes wrong inside kcoord, the compiler
answers as without it, and raises its own exceptions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import msgpack

from kcoord.artifacts.local import Artifact
from kcoord.backends import abandoned
from kcoord.backends.fail_open import fails_open, notices
from kcoord.backends.steps import UNLOADED, H, R, Steps
from kcoord.errors import KeyFactorError, SettingsError, StoreError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey
from kcoord.profiles.automatic import is_automatic
from kcoord.rank.connect import connect
from kcoord.rank.coordinator import ABSENT, Busy, Compilation, Coordinator, Request


@dataclass(frozen=True)
class Bypassed:
    """This request is not shared, for `reason`: use the compiler as without kcoord."""

    reason: str


@dataclass(frozen=True)
class _Asked:
    """A request with its identity in this process. `key` is the alias if `is_alias`."""

    coordinator: Coordinator
    key: CacheKey
    device: DeviceKey | None
    is_alias: bool


class Backend(Steps[R, H]):
    """One compiler.

    A hook calls `obtain` in place of the compiler. If the compiler asks a cache first and stores into it later, its hook calls
    `begin` and `finish`. The registry (`kcoord.backends.registry`) makes one instance for each process; it is thread-safe if the
    steps are. The class's module must not import the compiler when it is imported: launchers that lack the compiler use it, too.
    """

    @final
    def obtain(self, request: R, native: Callable[[], H]) -> H:
        """The handle of `request`: from memory, loaded, or compiled here. ``native()`` is the compiler as without kcoord.

        It answers if the request is bypassed, has no key, or cannot be loaded, and if kcoord has a fault. An artifact that does
        not load is compiled for this process alone, and stays. Raises the exceptions of `compile`, an
        `explicit` backend as `Compilation.run` does. Not guaranteed: exactly one compile in a job.
        """
        asked = self._asked(request)
        if isinstance(asked, Bypassed):
            return native()
        if self.keeps_handles and asked.device is not None:
            handle = asked.coordinator.in_memory(asked.key, asked.device)
            if handle is not ABSENT:
                return cast(H, handle)
        begun: object = self._begun(request, asked, True, True)
        if isinstance(begun, Artifact):
            handle = self._loaded(request, begun)
            if handle is not ABSENT:
                return self._kept(asked, handle)
            private = fails_open(lambda *arguments: None)(asked.coordinator.private)
            begun = private(begun.key, begun.path, str(asked.device or ""))
        if not isinstance(begun, Compilation):
            return native()
        try:
            handle = self._compiled(request, begun)
        except StoreError as error:  # kcoord's: no disk takes a compiler's files
            let_through(error)
            if self.explicit:
                raise
            notices.tell(f"{error}; kcoord stands aside", about=error.remedy)
            handle = ABSENT
        return native() if handle is ABSENT else self._kept(asked, handle)

    @final
    def begin(self, request: R, *, waits: bool = True, loads: bool = True) -> Artifact | Compilation | Busy | Bypassed:
        """The first half of the flow: the artifact to load, or the compile that this rank is to do and to `finish`.

        `BUSY` only without `waits`: another rank compiles it now. `loads` is false if it is only to be on this node.
        """
        asked = self._asked(request)
        return asked if isinstance(asked, Bypassed) else self._begun(request, asked, waits, loads)

    @final
    def finish(self, request: R, compilation: Compilation) -> Artifact | None:
        """The second half: publish the staged files. None: it is not shared, and its files stay in ``compilation.staging``.

        Raises nothing unless the backend is `explicit`; then `ArtifactInvalid`.
        """
        try:
            publish = self._published if self.explicit else fails_open(lambda *arguments: None)(self._published)
            return publish(request, compilation)
        finally:
            if not self.explicit and not compilation.ended:
                compilation.keep()
            abandoned.unregister(compilation)

    @final
    def prepare(self, request: R, waits: bool) -> str:
        """Have the artifact on this node, unloaded: ``compiled``, ``loaded`` or, without `waits`, ``busy``. For `replay`."""
        found = self.begin(request, waits=waits, loads=False)
        if isinstance(found, Compilation):
            self._compiled(request, found, loads=False)
            return "compiled"
        return "busy" if isinstance(found, Busy) else "loaded"

    # Its parts.

    def _asked(self, request: R) -> _Asked | Bypassed:
        return self._ask(request) if self.explicit else self._ask_openly(request)

    @fails_open(lambda self, request: Bypassed("an error in kcoord"))
    def _ask_openly(self, request: R) -> _Asked | Bypassed:
        try:
            return self._ask(request)
        except KeyFactorError as error:
            notices.tell(f"{self.label(request)} is compiled by each rank for itself: {error}")
            return Bypassed(str(error))
        except SettingsError as error:
            notices.tell(f"{error}; kcoord stands aside")
            return Bypassed(str(error))

    def _ask(self, request: R) -> _Asked | Bypassed:
        reason = self.bypass(request)
        if reason:
            return Bypassed(reason)
        coordinator = connect()
        if not self.explicit and coordinator.settings.disable:
            return Bypassed("kcoord is off")
        alias = self.alias(request)
        return _Asked(coordinator, alias or self.key(request), self.device(request), alias is not None)

    def _begun(self, request: R, asked: _Asked, waits: bool, loads: bool) -> Artifact | Compilation | Busy | Bypassed:
        begin = self._begin if self.explicit else self._begin_openly
        return begin(request, asked, waits, loads)

    def _begin(self, request: R, asked: _Asked, waits: bool, loads: bool) -> Artifact | Compilation | Busy:
        coordinator = asked.coordinator
        key = self._behind(request, asked) if asked.is_alias else asked.key
        target = asked.device.target if asked.device is not None else self.target(request)
        missed = False

        def recipe() -> str | None:
            nonlocal missed
            missed = True
            return self._recipe_digest(request)

        wanted = Request(
            key,
            self.home(request, key),
            str(asked.device or target or ""),
            target=target,
            explain=lambda: self.details(request),
            aside=self.aside,
            recipe=recipe,
            meanwhile=lambda: self.meanwhile(request),
            loads=loads,
        )
        found = coordinator.request(wanted) if waits else coordinator.attempt(wanted)
        # what is on this node was recorded when it was compiled, unless somebody gave the profile a name of its own
        if isinstance(found, Artifact) and (missed or not is_automatic(coordinator.settings.profile)):
            self._record(request, wanted.home, found.manifest.compile_seconds)
        return found

    @fails_open(lambda self, *arguments: Bypassed("an error in kcoord"))
    def _begin_openly(self, *arguments: Any) -> Artifact | Compilation | Busy | Bypassed:
        return self._begin(*arguments)

    def _behind(self, request: R, asked: _Asked) -> CacheKey:
        """The key that the alias stands for: the job's if a rank has traced it before, else traced now."""
        begun = time.perf_counter()
        content = asked.coordinator.choices.get(asked.key)
        if content is not None:
            try:
                return CacheKey.from_wire(msgpack.unpackb(content))
            except (ValueError, TypeError, KeyError, msgpack.exceptions.UnpackException):
                pass  # another version's: this rank traces
        key = self.key(request)
        content = msgpack.packb(key.to_wire(), unicode_errors="surrogatepass")
        asked.coordinator.choices.offer(asked.key, content, time.perf_counter() - begun)
        return key

    def _loaded(self, request: R, artifact: Artifact) -> Any:
        """The handle; `ABSENT` if the artifact does not load."""
        try:
            missing = [name for name in self.required(request) if not (artifact.path / name).is_file()]
            if missing:
                raise FileNotFoundError(f"it has no {', '.join(missing)}")
            return self.load(request, artifact)
        except Exception as error:  # a compiler's loader may raise anything
            let_through(error)
            if self.explicit:
                raise
            notices.tell(
                f"{artifact.path} does not load: {type(error).__name__}: {error}; this rank compiles for itself"
            )
            return ABSENT

    def _compiled(self, request: R, compilation: Compilation, loads: bool = True) -> Any:
        """The handle; `ABSENT` if there is none and nothing to load it from."""
        handle: Any = UNLOADED

        def compile(staging: Path) -> None:
            nonlocal handle
            with self.lower_caches(compilation.key):
                handle = self.compile(request, staging)

        artifact = compilation.run(compile, lambda _: self.finish(request, compilation), explicit=self.explicit)
        if handle is not UNLOADED or not loads:
            return handle
        artifact = artifact or fails_open(lambda: None)(compilation.adopted)()
        return ABSENT if artifact is None else self._loaded(request, artifact)

    def _kept(self, asked: _Asked, handle: H) -> H:
        if not self.keeps_handles or asked.device is None:
            return handle
        return asked.coordinator.keep_in_memory(asked.key, asked.device, handle)

    def _published(self, request: R, compilation: Compilation) -> Artifact | None:
        missing = [name for name in self.required(request) if not (compilation.staging / name).is_file()]
        if not compilation.shared:
            compilation.keep()
        elif not self.unchanged(request):
            compilation.keep("an input was written while it compiled")
        elif missing:
            compilation.keep(f"its compiler wrote no {', '.join(missing)}")
        else:
            took = time.perf_counter() - compilation.started
            self._record(request, compilation.home, took)  # before publishing, which delivers it
            return compilation.publish(strict=self.explicit)
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
