"""A rank's way of a request: memory → local tier → agent → compile → publish.

`Coordinator.request` serves backends (`kcoord.backends.Backend.begin`); `get_or_compile` is the generic API on top of
it. No fault of the agent, Redis or the store comes through here: the worst answer is a `Compilation` that nobody coordinates.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from kcoord.artifacts import local
from kcoord.artifacts.arch import contradiction
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.needs import host_libraries, unmet
from kcoord.artifacts.verified import Verified
from kcoord.errors import ArtifactInvalid, ArtifactUnreadable, KeyFactorError, StoreError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, current_device
from kcoord.packs.recipe import Recipe
from kcoord.rank import client as agent
from kcoord.rank.choices import Choices
from kcoord.rank.client import BUSY as BUSY
from kcoord.rank.client import AgentClient, forgets_after_fork
from kcoord.rank.client import Busy as Busy
from kcoord.rank.compilation import Compilation as Compilation
from kcoord.rank.compilation import CompilationContext, is_running
from kcoord.rank.directories import Directories, is_temporary
from kcoord.rank.memory import MemoryTier
from kcoord.rank.pool_start import PoolStart
from kcoord.rank.telemetry import RankTelemetry, Spans
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

T = TypeVar("T")


class _Absent:
    def __reduce__(self) -> str:
        return "ABSENT"  # a worker that gets a function by value compares with its own


ABSENT: Any = _Absent()
"""Sentinel: no handle is in memory. (A handle may be None: of an artifact that is loaded for its effects.)"""
_NONE: Any = object()  # stands for None in memory


class Request(NamedTuple):
    """A backend's request for the artifact of `key`, which lies at `home` once it is on this node.

    `device` and, on a miss, the details that ``explain()`` returns are recorded with the compiled artifact. Files that record
    another GPU than `target` are neither loaded nor published. `aside`: the artifact is no kernel of the job. On a miss
    ``recipe()`` is the digest of the key's recipe, or None. ``while_waiting()`` is called once if there is a wait; it must return
    at once, and not raise. `loads` is false for a warm-up, which wants the artifact to be there: it is not counted as loaded.
    `portable`: if the artifact needs other libraries than this host's, it is asked for once more, with these in its key.
    """

    key: CacheKey
    home: Path
    device: str = ""
    target: GPUTarget | None = None
    explain: Callable[[], Mapping[str, Any]] | None = None
    aside: bool = False
    recipe: Callable[[], str | None] = lambda: None
    while_waiting: Callable[[], None] | None = None
    loads: bool = True
    portable: bool = True


class Coordinator:
    """One process's access to kcoord. Thread-safe and fork-safe. Make it with `kcoord.connect`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.notices = Notices()
        self._directories = Directories(settings, self.notices)
        self._verified = Verified(settings.local_dir, strict=settings.policy == "require")
        self._memory: MemoryTier[Any] = MemoryTier(settings.memory_entries)
        self._client = AgentClient(settings, self.notices)
        self._telemetry = RankTelemetry(settings, self._client, self.notices, lambda: self.usable)
        self.pool = PoolStart(settings, self.notices, self._client)
        self._context = CompilationContext(
            self._client, self.notices, self._directories, self.find, self._telemetry.ended
        )
        self.choices = Choices(settings, self._client, self.notices, lambda: self.usable, self.find, self.record)
        atexit.register(self.close)
        forgets_after_fork(self)

    @property
    def counters(self) -> Spans:
        """Its ``read()`` returns the figures of this process."""
        return self._telemetry.spans

    def stands_aside(self, compiler: str, part: str, why: str) -> None:
        """Count in the job's figures that kcoord leaves `part` of a compiler to this process, and `why`."""
        self._telemetry.stands_aside(compiler, part, why)

    @property
    def usable(self) -> bool:
        """False if kcoord is off, or another user may write to the local directory: files of others are not loaded."""
        return self._directories.usable

    def trusts(self, home: str | Path) -> bool:
        """False if kcoord is off, or another user may write around `home`: nothing is loaded or published there."""
        return self._directories.is_private(home)

    def home(self, digest: str) -> Path:
        """The home in the local tier of an artifact whose compiler has no layout of its own."""
        return self.settings.local_dir / local.place_of(digest)

    def throws_away(self, home: Path) -> bool:
        """True if `home` lies in a temporary directory of this process: nothing compiled there is published in the store."""
        return is_temporary(home) and not home.is_relative_to(self.settings.local_dir)

    def _within_trust(self, key: CacheKey, home: Path) -> Path:
        """`home`; where signatures are required, a home in the local directory in place of one outside it.

        The local directory is that of one policy and one set of keys; a directory that the user named has artifacts of any.
        """
        required = self.settings.policy == "require"
        return self.home(key.digest) if required and not home.is_relative_to(self.settings.local_dir) else home

    def _published_at(self, key: CacheKey, home: Path) -> Path:
        """`home`, or a home in the local directory if nothing can be published there: it is compiled once on this node."""
        home = self._within_trust(key, home)
        return home if not self.trusts(home) or self._directories.takes(home) else self.home(key.digest)

    def request(self, asked: Request, *, wait: bool = True) -> Artifact | Compilation | Busy:
        """The artifact that is asked for, or the task of compiling it. Waits at most `Settings.longest_wait` seconds.

        Without `wait`: `BUSY`, which is counted nowhere, if another rank, of any node, compiles the key now: ask later. It waits
        for an artifact of the store all the same. Not guaranteed: that the other rank publishes; it may fail or give up.
        """
        begun = time.perf_counter()
        asked, artifact = self._local(asked)
        if artifact is not None:
            return self._loaded(asked, artifact, "", begun, wait)
        if asked.explain is not None:
            asked = asked._replace(key=asked.key.with_details(asked.explain()))
        if not self.trusts(asked.home) or is_running(asked.key.digest):
            return self._compilation(asked)
        begun = time.perf_counter()
        answer = self._claimed(asked, wait)
        if answer is BUSY and not wait:
            return BUSY
        try:
            return self._after(answer, asked, begun, wait)
        except BaseException:
            # interrupted, or no disk takes files: the exception would hold the lead for as long as it is kept
            if isinstance(answer, agent.Lead):
                self._client.give_up(answer, asked.key)
            raise

    def _local(self, asked: Request) -> tuple[Request, Artifact | None]:
        """The request, at the home where it can be published, and the artifact that this node has."""
        artifact = self.find(asked.key, asked.home, asked.target)
        if artifact is None and (home := self._published_at(asked.key, asked.home)) != asked.home:
            asked = asked._replace(home=home)
            artifact = self.find(asked.key, home, asked.target)
        return asked, artifact

    def _claimed(self, asked: Request, wait: bool) -> agent.Answer:
        recipe = asked.recipe()
        self.pool.missed(asked.target)
        return self._client.claim(
            asked.key, asked.home, wait=wait, recipe=recipe, while_waiting=asked.while_waiting,
            passing=self.throws_away(asked.home),
        )  # fmt: skip

    def _after(self, answer: agent.Answer, asked: Request, begun: float, wait: bool) -> Artifact | Compilation | Busy:
        """The artifact, or the compile that this rank is left with, after the `answer` to a claim that it made at `begun`."""
        took, waited = time.perf_counter() - begun, self._telemetry.waited
        if isinstance(answer, agent.Ready):
            waited("ok" if answer.source == "wait" else "fetch", asked.key, asked.aside, begun, took)
            begun = time.perf_counter()
            artifact = self.find(asked.key, asked.home, asked.target)
            if artifact is not None:
                return self._loaded(asked, artifact, answer.source, begun, wait)
            return self._compilation(asked, note="the published artifact was gone, or for another GPU")
        if isinstance(answer, agent.Lead):
            waited("lead", asked.key, asked.aside, begun, took)
            return self._compilation(asked, answer, note="the first rank was slow" if answer.hedges else "")
        if isinstance(answer, agent.Failed):
            note = f"it had failed on {answer.where}"
            waited("failed", asked.key, asked.aside, begun, took, note)
            return self._compilation(asked, failed=answer, note=note)
        note = answer.why if isinstance(answer, agent.Alone) else ""
        waited("alone", asked.key, asked.aside, begun, took, note)
        return self._compilation(asked, note=note)

    def _loaded(
        self, asked: Request, artifact: Artifact, source: str, begun: float, wait: bool
    ) -> Artifact | Compilation | Busy:
        if asked.portable and artifact.manifest.needs and unmet(artifact.manifest.needs):
            # it stays, for others, so that nothing can be published in its place
            key = asked.key.with_factors(**{"host libraries": host_libraries()})
            return self.request(asked._replace(key=key, home=self.home(key.digest), portable=False), wait=wait)
        if asked.loads:
            self._telemetry.loaded(artifact.key, artifact.manifest.compile_seconds, source, asked.aside, begun)
        return artifact

    def loaded_natively(self, key: CacheKey, saved: float, begun: float) -> None:
        """Count a load by the compiler's own cache, which began at `begun` by `time.perf_counter` and spared `saved` seconds."""
        if self.usable:
            self._telemetry.loaded(key, saved, "", False, begun)

    def _compilation(
        self, asked: Request, lead: agent.Lead | None = None, failed: agent.Failed | None = None, note: str = ""
    ) -> Compilation:
        key, home, staging = asked.key, asked.home, self._directories.new(asked.home)
        return Compilation(
            self._context, key, home, staging, asked.device, asked.aside, asked.target, lead, failed, note
        )

    def find(
        self,
        key: CacheKey,
        home: Path,
        target: GPUTarget | None = None,
        published: bool = False,
    ) -> Artifact | None:
        """The artifact at `home` if it verifies and does not record another GPU than `target`; else it is quarantined.

        Nothing is read where others may write (`trusts`). `published`: the agent has hashed its files this moment, so only its
        manifest is read.
        """
        home = self._within_trust(key, home)
        if not self.trusts(home):
            return None
        try:
            artifact = local.published(home, key.digest) if published else self._verified.open(home, key)
            if artifact is not None and (astray := contradiction(artifact.manifest.targets, target)):
                raise ArtifactInvalid(f"{home} holds code {astray}")
            return artifact
        except ArtifactUnreadable as error:  # other processes may be able to read it
            let_through(error)
            self.notices.tell(f"{error}; it is compiled again")
            return None
        except ArtifactInvalid as error:
            let_through(error)
            self.notices.tell(f"{error}; it is compiled again")
        try:
            local.quarantine(home)
        except StoreError as error:
            let_through(error)
            self.notices.tell(str(error))
        return None

    def private_directory(self) -> Path:
        """A new directory in the temporary directory, which lasts as long as this process."""
        return self._directories.new_private()

    def private(self, key: CacheKey, home: Path, device: str = "") -> Compilation:
        """The task of compiling `key` for this process alone: no claim, no wait. End it with `use_privately`."""
        compilation = self._compilation(Request(key, self._published_at(key, home), device))
        compilation.shared = False
        return compilation

    def get_or_compile(
        self,
        key: CacheKey,
        compile: Callable[[Path], Any],
        *,
        scope: Scope = Scope.DEVICE,
        target: GPUTarget | None = None,
        load: Callable[[Artifact], T] | None = None,
    ) -> Any:
        """The artifact of `key`; whichever rank asks first calls ``compile(staging)``, which writes files there.

        `scope` says how much of the current device the bytes depend on, `target` what `compile` compiles for if that is another
        GPU. With `load`, returns ``load(artifact)``, once per device and process: the handle is kept in memory. Raises what
        `compile` raises, or `ArtifactInvalid` if it wrote nothing, or code that says it is for another GPU. Another rank's
        failure is a hint: this one compiles for itself, at once. If that fails, too, `CompileFailed` has its exception as cause.
        Not guaranteed: exactly one compile. After a fault there may be two, and one artifact.
        """
        if not isinstance(key, CacheKey):
            raise KeyFactorError(
                f"the key {key!r:.80} is no CacheKey: make one with kcoord.CacheKey.of(compiler, name, …)"
            )
        device = current_device() if target is None else replace(current_device(), target=target)
        key = key.on(device, scope)
        handle = self.in_memory(key, device)
        if handle is not ABSENT:
            return handle
        artifact = self.ensure(key, device, compile)
        assert not isinstance(artifact, Busy)  # the answer of a claim that does not wait
        return self.keep_in_memory(key, device, load(artifact) if load else artifact)

    def in_memory(self, key: CacheKey, device: DeviceKey) -> Any:
        """The handle of `key` for `device`, or `ABSENT`; the key holds as much of the device as its scope says."""
        handle = self._memory.get(key.digest, device)
        if handle is None:
            return ABSENT
        self._telemetry.found_in_memory(key.backend)
        return None if handle is _NONE else handle

    def keep_in_memory(self, key: CacheKey, device: DeviceKey, handle: T) -> T:
        """Keep `handle` for `in_memory`; returns the handle that is kept, the first one of two threads."""
        kept = self._memory.put(key.digest, device, _NONE if handle is None else handle)
        return handle if kept is _NONE else kept

    def ensure(
        self, key: CacheKey, device: DeviceKey, compile: Callable[[Path], Any], *, wait: bool = True
    ) -> Artifact | Busy:
        """The artifact of a `key` that holds its `device`, unloaded. Without `wait`: `BUSY` if another rank compiles it."""
        asked = Request(key, self.home(key.digest), str(device), device.target)
        found = self.request(asked, wait=wait)
        if not isinstance(found, Compilation):
            return found
        return found.run(compile, lambda _: found.publish(strict=True), raises_errors=True)

    def status(self) -> dict[str, Any] | None:
        """The agent's status; None if no agent runs: none is started for it."""
        return self._client.status(quietly=True, start=False) if self.usable else None

    def record(self, recipe: Recipe) -> None:
        """Keep `recipe` for the profile that this job records, if it records one. Thread-safe; costs microseconds.

        Delivered with the spans, after each compile, and by `close`. Not guaranteed: that recipes which a process recorded
        after its last compile arrive if it is killed.
        """
        self._telemetry.record(recipe)

    def close(self) -> None:
        """Deliver spans and recipes, let go of the agent, and remove private copies. The coordinator may be used again."""
        self._telemetry.close()
        self._verified.close()
        self._client.close()
        self._directories.close()
        self.pool.close()

    def forget_after_fork(self) -> None:
        self._telemetry.forget_after_fork()
        self._verified.forget_after_fork()
        self._memory.forget_after_fork()
        self._directories.forget_after_fork()
