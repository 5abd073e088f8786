"""What a rank calls: memory → local tier → agent → compile → publish.

`Coordinator.request` is the whole way of a request for a backend; `get_or_compile` is the generic API on top of it. No
fault of the agent, Redis or the store comes through here: the worst answer is a `Compilation` that nobody coordinates.
"""

from __future__ import annotations

import atexit
import os
import platform
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from kcoord.agent import client as agent
from kcoord.agent.client import BUSY as BUSY
from kcoord.agent.client import AgentClient
from kcoord.agent.client import Busy as Busy
from kcoord.agent.ledger import Ledger
from kcoord.agent.outbox import Outbox
from kcoord.agent.protocol import Identity
from kcoord.artifacts import local
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.memory import MemoryTier
from kcoord.compilation import Compilation as Compilation
from kcoord.compilation import Workshop
from kcoord.errors import CompileFailed, StoreError
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, current_device
from kcoord.profiles.recipe import Recipe
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord.telemetry.metrics import Counters

T = TypeVar("T")


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
        self._workshop = Workshop(self._client, self.notices, lambda: self._usable, self._count)
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
        artifact = self._workshop.find(key, home, target) if self._usable else None
        if artifact is not None:
            counters.add(requests=1, local_hits=1, saved_seconds=artifact.manifest.compile_seconds)
            return artifact
        if explain is not None:
            key = key.with_details(explain())
        if not self._usable or key.digest in self._under_way():
            # a compile that needs itself would wait for itself
            return self._workshop.begin(key, home, device, counters, target)
        started = time.perf_counter()
        answer = self._client.claim(key, home, wait=wait)
        if answer is BUSY:
            return BUSY
        counters.add(wait_seconds=time.perf_counter() - started)
        if isinstance(answer, agent.Ready):
            artifact = self._workshop.find(
                key, home, target, "it was published and has vanished: does something clean it?"
            )
            if artifact is not None:
                outcome = {"waits" if answer.source == "wait" else "store_hits": 1}
                counters.add(requests=1, **outcome, saved_seconds=artifact.manifest.compile_seconds)
                return artifact
        lead = answer if isinstance(answer, agent.Lead) else None
        failed = answer if isinstance(answer, agent.Failed) else None
        if lead is None and failed is None:
            counters.add(alone=1)
        return self._workshop.begin(key, home, device, counters, target, lead, failed)

    def find(self, key: CacheKey, home: Path, target: GPUTarget | None = None) -> Artifact | None:
        """The artifact at `home` if it verifies, and does not say that it is for another GPU than `target`."""
        return self._workshop.find(key, home, target)

    def private_directory(self) -> Path:
        """A new directory in the temporary directory, which lasts as long as this process."""
        return self._workshop.private_directory()

    def private(self, key: CacheKey, home: Path) -> Compilation:
        """The task of compiling `key` for this process alone: nobody is asked, nobody waits. End it with `keep`."""
        return self._workshop.begin(key, home, "", self.counters)

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
        self._workshop.close()

    def _forget_after_fork(self) -> None:
        """The parent's counters and recipes are the parent's to deliver."""
        self.counters, self._delivering = Counters(), threading.Lock()
        self._outbox = Outbox(self.settings, self._client, self.notices)
        self._memory.forget_after_fork()
        self._workshop.forget_after_fork()
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

    def _count(self, compilation: Compilation, amounts: dict[str, float]) -> None:
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
