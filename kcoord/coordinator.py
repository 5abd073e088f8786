"""What a rank calls: memory → local tier → agent → compile → publish.

`Coordinator.request` is the whole way of a request for a backend; `get_or_compile` is the generic API on top of it. No
fault of the agent, Redis or the store comes through here: the worst answer is a `Compilation` that nobody coordinates.
"""

from __future__ import annotations

import atexit
import os
import platform
import shutil
import tempfile
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from kcoord.agent import client as agent
from kcoord.agent.client import BUSY as BUSY
from kcoord.agent.client import AgentClient
from kcoord.agent.client import Busy as Busy
from kcoord.agent.ledger import Ledger
from kcoord.agent.protocol import Identity
from kcoord.artifacts import local
from kcoord.artifacts.arch import contradiction, recorded_targets
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import Origin
from kcoord.artifacts.memory import MemoryTier
from kcoord.errors import ArtifactInvalid, CompileFailed, StoreError
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, current_device
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord.telemetry.metrics import Counters
from kcoord.warmup.outbox import Outbox
from kcoord.warmup.profile import Recipe

T = TypeVar("T")


@dataclass
class Compilation:
    """This rank is to compile `key` into `staging`, then call exactly one of `publish`, `fail` and `give_up`.

    `failed` is set if another rank's compile of the key failed a moment ago: compile anyway, to raise the compiler's own
    exception, or raise `CompileFailed`. `target` is the GPU that was asked for, if it is known.
    """

    coordinator: Coordinator
    key: CacheKey
    home: Path
    staging: Path
    device: str
    counters: Counters
    target: GPUTarget | None = None
    lead: agent.Lead | None = None
    failed: agent.Failed | None = None
    started: float = 0.0
    ended: bool = False

    def publish(self, *, strict: bool = False) -> Artifact:
        """Make the staged files the artifact. If that is impossible they stay in `staging`, for this process alone.

        So do files that say of themselves that they are for another GPU than `target`; then every rank compiles for itself.
        `strict` raises `ArtifactInvalid` for these, and the compilation is to end with `fail`. Raises `ArtifactInvalid` if
        nothing was staged.
        """
        took = time.perf_counter() - self.started
        return self.coordinator._publish(self, took, strict)

    def keep(self) -> None:
        """Use the staged files where they are, for this process alone, until it ends."""
        self.coordinator._keep(self)

    def fail(self, log: str) -> None:
        """The compiler failed, and said `log`."""
        self.coordinator._fail(self, log)

    def give_up(self) -> None:
        """Nothing was compiled, and nothing failed."""
        self.coordinator._give_up(self)


_coordinators: weakref.WeakSet[Coordinator] = weakref.WeakSet()


def _forget_after_fork() -> None:
    for coordinator in list(_coordinators):
        coordinator._forget_after_fork()


os.register_at_fork(after_in_child=_forget_after_fork)


class _Compiling(threading.local):
    """The digests that the current thread is compiling."""

    def __init__(self) -> None:
        self.keys: set[str] = set()


class Coordinator:
    """One process's access to kcoord. Thread-safe and fork-safe. Make it with `kcoord.connect`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.notices = Notices()
        self.counters = Counters()
        self._delivering = threading.Lock()  # protects a sum from being delivered twice
        self._checked: bool | None = None
        self._memory: MemoryTier[Any] = MemoryTier(settings.memory_entries)
        self._client = AgentClient(settings, self.notices)
        self._outbox = Outbox(settings, self._client, self.notices)
        self._compiling = _Compiling()
        self._private: list[Path] = []  # staging directories that this process still loads from
        atexit.register(self.close)
        _coordinators.add(self)

    @property
    def _usable(self) -> bool:
        """False if kcoord is off, or the local directory is not ours: what another user put there is not loaded."""
        if self._checked is None:
            self._checked = not self.settings.disable and self._owns_local_dir()
        return self._checked

    def _owns_local_dir(self) -> bool:
        try:
            local.make_private(self.settings.local_dir)
        except StoreError as error:
            self.notices.tell(f"KCOORD_LOCAL_DIR={error}; kernels are compiled without coordination")
            return False
        return True

    def home(self, digest: str) -> Path:
        """Where the local tier keeps the artifact of a key that has no compiler's layout of its own."""
        return self.settings.local_dir / "objects" / digest[:2] / digest

    @overload
    def request(
        self,
        key: CacheKey,
        home: Path,
        device: str = "",
        *,
        target: GPUTarget | None = None,
        explain: Callable[[], Mapping[str, Any]] | None = None,
        counters: Counters | None = None,
        wait: Literal[True] = True,
    ) -> Artifact | Compilation: ...

    @overload
    def request(
        self,
        key: CacheKey,
        home: Path,
        device: str = "",
        *,
        target: GPUTarget | None = None,
        explain: Callable[[], Mapping[str, Any]] | None = None,
        counters: Counters | None = None,
        wait: bool,
    ) -> Artifact | Compilation | Busy: ...

    def request(
        self,
        key: CacheKey,
        home: Path,
        device: str = "",
        *,
        target: GPUTarget | None = None,
        explain: Callable[[], Mapping[str, Any]] | None = None,
        counters: Counters | None = None,
        wait: bool = True,
    ) -> Artifact | Compilation | Busy:
        """The artifact of `key`, at `home`; or the task of compiling it. Waits at most `max_wait` seconds.

        Without `wait`: `BUSY`, which is counted nowhere, if another rank, of this node or another, is at it now. Ask again later.
        An artifact in the store is waited for all the same. Not guaranteed: that who is at it gets there, or that it compiles;
        it may find the artifact, or give up.

        `device` and, on a miss, the details that `explain` returns are recorded with what is compiled. What says of itself that
        it is for another GPU than `target` is neither loaded nor published. `counters` counts what is no kernel of the job
        apart from its statistics.
        """
        counters = self.counters if counters is None else counters
        artifact = self.find(key, home, target) if self._usable else None
        if artifact is not None:
            counters.add(requests=1, local_hits=1, saved_seconds=artifact.manifest.compile_seconds)
            return artifact
        if explain is not None:
            key = key.with_details(explain())
        if not self._usable or key.digest in self._under_way():
            # a compile that needs itself would wait for itself
            return self._compile(key, home, device, counters, target)
        started = time.perf_counter()
        answer = self._client.claim(key, home, wait=wait)
        if answer is BUSY:
            return BUSY
        counters.add(wait_seconds=time.perf_counter() - started)
        if isinstance(answer, agent.Ready):
            artifact = self.find(key, home, target, "it was published and has vanished: does something clean it?")
            if artifact is not None:
                outcome = {"waits" if answer.source == "wait" else "store_hits": 1}
                counters.add(requests=1, **outcome, saved_seconds=artifact.manifest.compile_seconds)
                return artifact
        lead = answer if isinstance(answer, agent.Lead) else None
        failed = answer if isinstance(answer, agent.Failed) else None
        if lead is None and failed is None:
            counters.add(alone=1)
        return self._compile(key, home, device, counters, target, lead, failed)

    def private(self, key: CacheKey, home: Path) -> Compilation:
        """The task of compiling `key` for this process alone: nobody is asked, nobody waits. End it with `keep`."""
        return self._compile(key, home, "", self.counters)

    def find(
        self, key: CacheKey, home: Path, target: GPUTarget | None = None, missing: str | None = None
    ) -> Artifact | None:
        """The artifact at `home` if it verifies, and does not say that it is for another GPU than `target`.

        One that fails is moved into quarantine. `missing` is what to tell if there is none.
        """
        try:
            artifact = local.open_artifact(home, key.digest)
            if artifact is None and missing is not None:
                self.notices.tell(f"{home}: {missing}")
            astray = contradiction(artifact.manifest.targets, target) if artifact is not None else ""
            if astray:
                raise ArtifactInvalid(f"{home} holds code {astray}")
            return artifact
        except ArtifactInvalid as error:
            self.notices.tell(f"{error}; it is compiled again")
        try:
            local.quarantine(home)
        except StoreError as error:
            self.notices.tell(str(error))
        return None

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
        `compile` raises where it ran, `CompileFailed` in the other ranks, `ArtifactInvalid` if it wrote nothing, or code that
        says it is for another GPU. Not guaranteed: exactly one compile. After a fault there may be two, and one artifact.
        """
        device = current_device() if target is None else replace(current_device(), target=target)
        key = key.on(device, scope)
        handle = self.in_memory(key, device)
        return self.serve(key, device, compile, load) if handle is None else handle

    def in_memory(self, key: CacheKey, device: DeviceKey) -> Any | None:
        """The handle of `key` for `device` if this process has one; the key holds as much of the device as its scope says."""
        handle = self._memory.get(key.digest, device)
        if handle is not None:
            self.counters.add(requests=1, memory_hits=1)
        return handle

    def serve(
        self,
        key: CacheKey,
        device: DeviceKey,
        compile: Callable[[Path], Any],
        load: Callable[[Artifact], T] | None = None,
    ) -> Any:
        """As `get_or_compile`, of a key that holds its device, and is not in memory."""
        artifact = self.ensure(key, device, compile)
        return self._memory.put(key.digest, device, load(artifact) if load else artifact)

    @overload
    def ensure(self, key: CacheKey, device: DeviceKey, compile: Callable[[Path], Any]) -> Artifact: ...

    @overload
    def ensure(
        self, key: CacheKey, device: DeviceKey, compile: Callable[[Path], Any], *, wait: bool
    ) -> Artifact | Busy: ...

    def ensure(
        self, key: CacheKey, device: DeviceKey, compile: Callable[[Path], Any], *, wait: bool = True
    ) -> Artifact | Busy:
        """As `serve`, of the artifact itself, which is not loaded. Without `wait`: `BUSY` if another rank is at it."""
        found = self.request(key, self.home(key.digest), str(device), target=device.target, wait=wait)
        return self._run(found, compile) if isinstance(found, Compilation) else found

    def record(self, recipe: Recipe) -> None:
        """Keep `recipe` for the profile that this job records, if it records one. Thread-safe; costs microseconds.

        Delivered with the statistics, after each compile, and by `close`. Not guaranteed: that what a process recorded after its
        last compile arrives if it is killed.
        """
        if self.settings.profile is not None and self._usable:
            self._outbox.put(recipe)

    def close(self) -> None:
        """Deliver statistics and recipes, let go of the agent, and remove private copies. The coordinator may be used again."""
        if not self._deliver_counters():
            self._keep_counters()
        if not self._outbox.deliver():
            self._outbox.keep()
        self._client.close()
        private, self._private = self._private, []
        for directory in private:
            shutil.rmtree(directory, ignore_errors=True)

    def _forget_after_fork(self) -> None:
        """The parent's counters and recipes are the parent's to deliver, and its private copies its to remove."""
        self.counters, self._delivering = Counters(), threading.Lock()
        self._outbox = Outbox(self.settings, self._client, self.notices)
        self._memory.forget_after_fork()
        self._private = []
        self._compiling = _Compiling()

    def _run(self, compilation: Compilation, compile: Callable[[Path], Any]) -> Artifact:
        failed = compilation.failed
        if failed is not None:
            compilation.give_up()
            raise CompileFailed(compilation.key.name, failed.log, failed.where)
        under_way = self._under_way()
        under_way.add(compilation.key.digest)
        try:
            compile(compilation.staging)
            return compilation.publish(strict=True)
        except Exception:
            compilation.fail(traceback.format_exc())
            raise
        except BaseException:
            compilation.give_up()  # interrupted: that says nothing about the kernel
            raise
        finally:
            under_way.discard(compilation.key.digest)

    def _under_way(self) -> set[str]:
        """The keys that this thread is compiling now."""
        return self._compiling.keys

    def _compile(
        self,
        key: CacheKey,
        home: Path,
        device: str,
        counters: Counters,
        target: GPUTarget | None = None,
        lead: agent.Lead | None = None,
        failed: agent.Failed | None = None,
    ) -> Compilation:
        staging = self._staging(home)
        return Compilation(self, key, home, staging, device, counters, target, lead, failed, time.perf_counter())

    def _staging(self, home: Path) -> Path:
        if self._usable:
            try:
                return local.new_staging(home)
            except StoreError as error:
                self.notices.tell(f"{error}; this process keeps its kernels in a temporary directory")
        return self.private_directory()

    def private_directory(self) -> Path:
        """A new directory in the temporary directory, which lasts as long as this process."""
        directory = Path(tempfile.mkdtemp(prefix="kcoord-"))
        self._private.append(directory)
        return directory

    def _publish(self, compilation: Compilation, took: float, strict: bool) -> Artifact:
        if compilation.ended:
            raise ArtifactInvalid(f"{compilation.key.name} was published or failed before")
        astray = self._astray(compilation)
        if astray and strict:
            raise ArtifactInvalid(f"{astray}: compile for the current device, or pass the target= that it is for")
        compilation.ended = True
        try:
            return self._withhold(compilation, took, astray) if astray else self._settle(compilation, took)
        finally:
            self._count(compilation, compiles=1, compile_seconds=took)

    def _astray(self, compilation: Compilation) -> str:
        """What the staged files say that contradicts what was asked for; empty if nothing does."""
        if compilation.target is None or not self._usable:
            return ""
        try:
            astray = contradiction(recorded_targets(compilation.staging), compilation.target)
        except OSError:
            return ""  # publishing meets it too, and says what is wrong
        return astray and f"{compilation.key.name} was compiled {astray}"

    def _withhold(self, compilation: Compilation, took: float, why: str) -> Artifact:
        """For this process alone, as without kcoord; who waits compiles for itself, at once."""
        self.notices.tell(f"{why}: it is not shared")
        if compilation.lead is not None:
            self._client.fail(compilation.lead, compilation.key, why)
        self._private.append(compilation.staging)
        return local.adopt(compilation.staging, compilation.key, took, Origin.here(0, None, compilation.device))

    def _settle(self, compilation: Compilation, took: float) -> Artifact:
        """Publish through the agent; without one directly; if the disk refuses, use the staged files where they are."""
        key, home, staging = compilation.key, compilation.home, compilation.staging
        if self._usable and staging not in self._private:
            self._client.publish(compilation.lead, key, staging, home, took, compilation.device)
            # also if no answer came: the agent may have ended between rename and reply
            artifact = self.find(key, home, compilation.target)
            if artifact is not None:
                return artifact
            try:
                # a name that only we know: an agent that is slow, and not dead, may still move the one that it was given
                staging = staging.rename(staging.with_name(f"{staging.name}-own"))
            except FileNotFoundError:
                artifact = self.find(key, home, compilation.target)  # it was faster, this very moment
                if artifact is not None:
                    return artifact
            except OSError as error:
                self.notices.tell(f"{error}; the kernel stays with this process")
            self._private.append(staging)  # removed at the end of this process, unless it is published after all
            try:
                return local.publish_local(staging, home, key, took, Origin.here(0, None, compilation.device))
            except StoreError as error:
                self.notices.tell(f"{error}; the kernel stays with this process")
        return local.adopt(staging, key, took, Origin.here(0, None, compilation.device))

    def _keep(self, compilation: Compilation) -> None:
        compilation.ended = True
        took = time.perf_counter() - compilation.started
        self._count(compilation, compiles=1, compile_seconds=took)
        self._private.append(compilation.staging)

    def _fail(self, compilation: Compilation, log: str) -> None:
        self._end(compilation, lambda lead: self._client.fail(lead, compilation.key, log))

    def _give_up(self, compilation: Compilation) -> None:
        self._end(compilation, lambda lead: self._client.give_up(lead, compilation.key))

    def _end(self, compilation: Compilation, tell: Callable[[agent.Lead], None]) -> None:
        if compilation.ended:
            return
        compilation.ended = True
        if compilation.lead is not None:
            tell(compilation.lead)  # first: others wait
        shutil.rmtree(compilation.staging, ignore_errors=True)
        self._count(compilation, failures=1)

    def _count(self, compilation: Compilation, **amounts: float) -> None:
        """A request is counted with its outcome, and told at once: a compile worker may be killed without a warning."""
        compilation.counters.add(requests=1, **amounts)
        self._deliver_counters()
        self._outbox.deliver()

    def _deliver_counters(self) -> bool:
        """False: there is something to deliver, and no agent to take it."""
        if not self.counters.undelivered() or not self._usable or not self._delivering.acquire(blocking=False):
            return True  # another thread is at it, and the next delivery has the rest
        try:
            counters = self.counters.undelivered()
            if not self._client.report(counters):
                return False
            self.counters.delivered(counters)
        finally:
            self._delivering.release()
        return True

    def _keep_counters(self) -> None:
        """A warm process needed no agent, and starts none to say so: its counters go where the agent's would lie."""
        counters = self.counters.undelivered()
        ledger = Ledger(self.settings.local_dir, f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}")
        ledger.add(Identity.here(self.settings.job).job, counters)
        try:
            ledger.save()
        except OSError as error:
            self.notices.tell(f"statistics are not kept: {error}")
        else:
            self.counters.delivered(counters)
