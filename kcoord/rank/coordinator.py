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
from typing import Any, Literal, NamedTuple, TypeVar, overload

from kcoord.artifacts import local
from kcoord.artifacts.arch import contradiction
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.verified import Verified
from kcoord.errors import ArtifactInvalid, ArtifactUnreadable, StoreError
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, current_device
from kcoord.packs.recipe import Recipe
from kcoord.rank import client as agent
from kcoord.rank.choices import Choices
from kcoord.rank.client import BUSY as BUSY
from kcoord.rank.client import AgentClient
from kcoord.rank.client import Busy as Busy
from kcoord.rank.compilation import Compilation as Compilation
from kcoord.rank.compilation import CompilationContext, is_running
from kcoord.rank.connection_pool import forgets_after_fork
from kcoord.rank.memory import MemoryTier
from kcoord.rank.own_tiers import OwnTiers
from kcoord.rank.pool_start import PoolStart
from kcoord.rank.staging import StagingDirectories, is_temporary
from kcoord.rank.telemetry import RankTelemetry, Spans
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

T = TypeVar("T")

ABSENT: Any = object()
"""No handle is in memory. None may be one: of an artifact that is loaded for its effects."""
_NONE: Any = object()  # stands for None in memory


class Request(NamedTuple):
    """A backend's request for the artifact of `key`, which lies at `home` once it is on this node.

    `device` and, on a miss, the details that ``explain()`` returns are recorded with the compiled artifact. Files that record
    another GPU than `target` are neither loaded nor published. `aside`: the artifact is no kernel of the job. On a miss
    ``recipe()`` is the digest of the key's recipe, or None. ``while_waiting()`` is called once if there is a wait; it must return
    at once, and not raise. `loads` is false for a warm-up, which wants the artifact to be there: it is not counted as loaded.
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


class Coordinator:
    """One process's access to kcoord. Thread-safe and fork-safe. Make it with `kcoord.connect`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.notices = Notices()
        self._tiers = OwnTiers(settings, self.notices)
        self._verified = Verified(settings.local_dir, strict=settings.policy == "require")
        self._memory: MemoryTier[Any] = MemoryTier(settings.memory_entries)
        self._client = AgentClient(settings, self.notices)
        self._telemetry = RankTelemetry(settings, self._client, self.notices, lambda: self.usable)
        self.pool = PoolStart(settings, self.notices, self._client)
        self._staging = StagingDirectories(self.notices, self._tiers.is_private, settings.local_dir)
        self._context = CompilationContext(self._client, self.notices, self._staging, self.find, self._telemetry.ended)
        self.choices = Choices(settings, self._client, self.notices, lambda: self.usable, self.find, self.record)
        atexit.register(self.close)
        forgets_after_fork(self)

    @property
    def counters(self) -> Spans:
        """Its ``read()`` returns the figures of this process."""
        return self._telemetry.spans

    @property
    def usable(self) -> bool:
        """False if kcoord is off, or another user may write to the local directory: files of others are not loaded."""
        return self._tiers.usable

    def trusts(self, home: str | Path) -> bool:
        """False where nothing is loaded or published: kcoord is off, or another user may write to the directory around `home`."""
        return self._tiers.is_private(home)

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
        return home if not self.trusts(home) or self._tiers.takes(home) else self.home(key.digest)

    def request(self, asked: Request) -> Artifact | Compilation:
        """The artifact that is asked for, or the task of compiling it. Waits at most `Settings.longest_wait` seconds."""
        return self._found_or_claimed(asked, wait=True)

    def attempt(self, asked: Request) -> Artifact | Compilation | Busy:
        """As `request`, or `BUSY`, which is counted nowhere, if another rank, of any node, compiles the key now: ask later.

        Waits for an artifact of the store all the same. Not guaranteed: that the other rank publishes; it may fail or give up.
        """
        return self._found_or_claimed(asked, wait=False)

    @overload
    def _found_or_claimed(self, asked: Request, wait: Literal[True]) -> Artifact | Compilation: ...

    @overload
    def _found_or_claimed(self, asked: Request, wait: bool) -> Artifact | Compilation | Busy: ...

    def _found_or_claimed(self, asked: Request, wait: bool) -> Artifact | Compilation | Busy:
        key, home, telemetry = asked.key, asked.home, self._telemetry
        begun = time.perf_counter()
        artifact = self.find(key, home, asked.target)
        if artifact is None and (home := self._published_at(key, asked.home)) != asked.home:
            asked = asked._replace(home=home)
            artifact = self.find(key, home, asked.target)
        if artifact is not None:
            if asked.loads:
                telemetry.loaded(artifact, "", asked.aside, begun)
            return artifact
        if asked.explain is not None:
            key = key.with_details(asked.explain())
        if not self.trusts(home) or is_running(key.digest):
            return self._compilation(key, home, asked.device, asked.aside, asked.target)
        vanished: list[Path] = []
        recipe = asked.recipe()
        for attempt in (1, 2):  # if it vanished, all waiting ranks ask again, and one of them leads
            begun = time.perf_counter()
            self.pool.missed(asked.target)
            answer = self._client.claim(
                key, home, wait=wait, recipe=recipe, while_waiting=asked.while_waiting, passing=self.throws_away(home)
            )
            if answer is BUSY and not wait:
                return BUSY
            took = time.perf_counter() - begun
            if not isinstance(answer, agent.Ready):
                break
            telemetry.waited("ok" if answer.source == "wait" else "fetch", key, asked.aside, begun, took)
            begun = time.perf_counter()
            artifact = self.find(key, home, asked.target, vanished.append)
            if artifact is not None:
                if asked.loads:
                    telemetry.loaded(artifact, answer.source, asked.aside, begun)
                return artifact
            if len(vanished) < attempt:
                break  # it is torn, or for another GPU: the next answer would be the same
        if len(vanished) == 2:
            self.notices.tell(f"{home}: it was published and has vanished: does something clean it?")
        try:
            return self._begun(asked, key, answer, begun, took)
        except BaseException:
            # interrupted, or no disk takes files: the exception would hold the lead for as long as it is kept
            if isinstance(answer, agent.Lead):
                self._client.give_up(answer, key)
            raise

    def _begun(self, asked: Request, key: CacheKey, answer: agent.Answer, begun: float, took: float) -> Compilation:
        """The compile that this rank is left with: `answer` is to a claim made at `begun` and answered `took` seconds later."""
        telemetry, lead, failed, note = self._telemetry, None, None, ""
        if isinstance(answer, agent.Ready):
            note = "the published artifact was gone, or for another GPU"
        elif isinstance(answer, agent.Lead):
            lead, note = answer, "the first rank was slow" if answer.hedges else ""
            telemetry.waited("lead", key, asked.aside, begun, took)
        elif isinstance(answer, agent.Failed):
            failed, note = answer, f"it had failed on {answer.where}"
            telemetry.waited("failed", key, asked.aside, begun, took, note)
        elif isinstance(answer, agent.Alone):
            note = answer.why
            telemetry.waited("alone", key, asked.aside, begun, took, note)
        return self._compilation(key, asked.home, asked.device, asked.aside, asked.target, lead, failed, note)

    def _compilation(self, key: CacheKey, home: Path, *rest: Any) -> Compilation:
        return Compilation(self._context, key, home, self._staging.new(home), *rest)

    def find(
        self,
        key: CacheKey,
        home: Path,
        target: GPUTarget | None = None,
        missing: Callable[[Path], object] = lambda home: None,
        published: bool = False,
    ) -> Artifact | None:
        """The artifact at `home` if it verifies and does not record another GPU than `target`; else it is quarantined.

        ``missing(home)`` is called if there is none. Nothing is read where others may write (`trusts`). `published`: the agent
        has hashed its files this moment, so only its manifest is read.
        """
        home = self._within_trust(key, home)
        if not self.trusts(home):
            return None
        try:
            artifact = local.published(home, key.digest) if published else self._verified.open(home, key)
            if artifact is None:
                missing(home)
            astray = contradiction(artifact.manifest.targets, target) if artifact is not None else ""
            if astray:
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
        return self._staging.new_private()

    def private(self, key: CacheKey, home: Path, device: str = "") -> Compilation:
        """The task of compiling `key` for this process alone: no claim, no wait. End it with `keep`."""
        compilation = self._compilation(key, self._published_at(key, home), device, False)
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
        found = self.request(asked) if wait else self.attempt(asked)
        if not isinstance(found, Compilation):
            return found
        try:
            return found.run(compile, lambda _: found.publish(strict=True), explicit=True)
        except ArtifactInvalid as error:
            if not found.lost:
                raise
            self.notices.tell(
                f"{error}; its files have vanished, and it is compiled again: does something clean this disk?"
            )
        again = self.private(key, asked.home, asked.device)
        again.run(compile, lambda _: again.keep(), explicit=True)
        return again.adopted()

    def status(self) -> dict[str, Any] | None:
        """The agent's status; None if no agent runs: none is started for it."""
        return self._client.status(quietly=True, start=False) if self.usable else None

    def stats(self, job: str) -> dict[str, Any] | None:
        """The figures of `job` on this node; None if no agent runs: none is started for it."""
        return self._client.stats(job, quietly=True, start=False) if self.usable else None

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
        self._staging.close()
        self.pool.close()

    def forget_after_fork(self) -> None:
        self._telemetry.forget_after_fork()
        self._verified.forget_after_fork()
        self._memory.forget_after_fork()
        self._staging.forget_after_fork()
