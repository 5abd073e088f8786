"""What a rank calls: memory → local tier → agent → compile → publish.

`Coordinator.request` is the whole way of a request for a backend; `get_or_compile` is the generic API on top of it. No
fault of the agent, Redis or the store comes through here: the worst answer is a `Compilation` that nobody coordinates.
"""

from __future__ import annotations

import atexit
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, overload

from kcoord.artifacts import choices, local
from kcoord.artifacts.local import Artifact
from kcoord.errors import ArtifactInvalid, CompileFailed, ProtocolError, StoreError
from kcoord.files import private
from kcoord.fork import forgets_after_fork
from kcoord.interruption import interruption_in, let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import DeviceKey, GPUTarget, Scope, current_device
from kcoord.profiles.recipe import Recipe
from kcoord.rank import client as agent
from kcoord.rank.ahead import WorkAhead
from kcoord.rank.client import BUSY as BUSY
from kcoord.rank.client import AgentClient
from kcoord.rank.client import Busy as Busy
from kcoord.rank.compilation import Compilation as Compilation
from kcoord.rank.compilation import Workshop
from kcoord.rank.memory import MemoryTier
from kcoord.rank.reporting import Recorder
from kcoord.settings import Settings
from kcoord.telemetry.counters import Counters, by_backend
from kcoord.telemetry.events import Notices

T = TypeVar("T")

ABSENT: Any = object()
"""What is not in memory; None may well be: a handle that was loaded for its effects."""
_NONE: Any = object()  # stands for None in memory


@dataclass(frozen=True)
class Request:
    """What a backend asks for: the artifact of `key`, which lies at `home` once it is on this node.

    `device` and, on a miss, the details that ``explain()`` returns are recorded with what is compiled. What says of itself that
    it is for another GPU than `target` is neither loaded nor published. `counters` counts what is no kernel of the job apart from
    its statistics. ``meanwhile()`` is called once if there is a wait; it must return at once, and not raise. `loads`: what is
    found is loaded now, and counts; a warm-up only wants it to be there.
    """

    key: CacheKey
    home: Path
    device: str = ""
    target: GPUTarget | None = None
    explain: Callable[[], Mapping[str, Any]] | None = None
    counters: Counters | None = None
    meanwhile: Callable[[], None] | None = None
    loads: bool = True


class _Compiling(threading.local):
    """The digests that the current thread is compiling."""

    def __init__(self) -> None:
        self.keys: set[str] = set()


class Coordinator:
    """One process's access to kcoord. Thread-safe and fork-safe. Make it with `kcoord.connect`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.notices = Notices()
        self._checked: bool | None = None
        self._memory: MemoryTier[Any] = MemoryTier(settings.memory_entries)
        self._client = AgentClient(settings, self.notices)
        self._recorder = Recorder(settings, self._client, self.notices, lambda: self.usable)
        self.ahead = WorkAhead(settings, self.notices)
        self._compiling = _Compiling()
        self._workshop = Workshop(self._client, self.notices, lambda: self.usable, self._recorder.ended)
        atexit.register(self.close)
        forgets_after_fork(self)

    @property
    def counters(self) -> Counters:
        """What this process's requests for kernels came to."""
        return self._recorder.counters

    @property
    def usable(self) -> bool:
        """False if kcoord is off, or the local directory is not ours: what another user put there is not loaded."""
        if self._checked is None:
            self._checked = not self.settings.disable and self._owns_local_dir()
        return self._checked

    def _owns_local_dir(self) -> bool:
        try:
            private.make_private(self.settings.local_dir)
        except StoreError as error:
            let_through(error)
            self.notices.tell(f"KCOORD_LOCAL_DIR={error}; kernels are compiled without coordination")
            return False
        return True

    def home(self, digest: str) -> Path:
        """Where the local tier keeps the artifact of a key that has no compiler's layout of its own."""
        return self.settings.local_dir / "objects" / digest[:2] / digest

    def request(self, asked: Request) -> Artifact | Compilation:
        """The artifact that is asked for, or the task of compiling it. Waits at most `max_wait` seconds."""
        return self._found_or_claimed(asked, wait=True)

    def attempt(self, asked: Request) -> Artifact | Compilation | Busy:
        """As `request`, or `BUSY`, which is counted nowhere, if another rank, of this node or another, is at it now: ask later.

        An artifact in the store is waited for all the same. Not guaranteed: that who is at it gets there, or that it compiles;
        it may find the artifact, or give up.
        """
        return self._found_or_claimed(asked, wait=False)

    @overload
    def _found_or_claimed(self, asked: Request, wait: Literal[True]) -> Artifact | Compilation: ...

    @overload
    def _found_or_claimed(self, asked: Request, wait: bool) -> Artifact | Compilation | Busy: ...

    def _found_or_claimed(self, asked: Request, wait: bool) -> Artifact | Compilation | Busy:
        key, home, recorder = asked.key, asked.home, self._recorder
        counters = recorder.counters if asked.counters is None else asked.counters
        begun = time.perf_counter()
        artifact = self._workshop.find(key, home, asked.target) if self.usable else None
        if artifact is not None:
            if asked.loads:
                recorder.loaded(artifact, "local_hits", counters, begun)
            return artifact
        if asked.explain is not None:
            key = key.with_details(asked.explain())
        if not self.usable or key.digest in self._under_way():
            # a compile that needs itself would wait for itself
            return self._workshop.begin(key, home, asked.device, counters, asked.target)
        vanished: list[Path] = []
        for attempt in (1, 2):  # of all who were told that it is ready, and find nothing, one leads if they ask again
            begun = time.perf_counter()
            with self.ahead.during(asked.meanwhile) as waits:
                answer = self._client.claim(key, home, wait=wait, meanwhile=waits)
            if answer is BUSY and not wait:
                return BUSY
            took = time.perf_counter() - begun
            if not isinstance(answer, agent.Ready):
                break
            recorder.waited("ok" if answer.source == "wait" else "fetch", key, counters, begun, took)
            begun = time.perf_counter()
            artifact = self._workshop.find(key, home, asked.target, vanished.append)
            if artifact is not None:
                if asked.loads:
                    recorder.loaded(artifact, "waits" if answer.source == "wait" else "store_hits", counters, begun)
                return artifact
            if len(vanished) < attempt:
                break  # what is there is torn, or for another GPU, and would be had again
        if len(vanished) == 2:
            self.notices.tell(f"{home}: it was published and has vanished: does something clean it?")
        try:
            return self._begun(asked, key, counters, answer, begun, took)
        except BaseException:
            # interrupted, or no disk takes files: whoever keeps the exception would keep the lead
            if isinstance(answer, agent.Lead):
                self._client.give_up(answer, key)
            raise

    def _begun(
        self, asked: Request, key: CacheKey, counters: Counters, answer: agent.Answer, begun: float, took: float
    ) -> Compilation:
        """The compile that the agent's `answer` leaves to this rank, which asked at `begun` and heard it so long after."""
        recorder, lead, failed, note = self._recorder, None, None, ""
        if isinstance(answer, agent.Ready):
            note = "what had been published was gone, or for another GPU"
        elif isinstance(answer, agent.Lead):
            lead, note = answer, "who had begun it was slow" if answer.hedges else ""
            recorder.waited("lead", key, counters, begun, took)
        elif isinstance(answer, agent.Failed):
            failed, note = answer, f"it had failed on {answer.where}"
            recorder.waited("failed", key, counters, begun, took, note)
        elif isinstance(answer, agent.Alone):
            note = answer.why
            recorder.waited("alone", key, counters, begun, took, note)
        if lead is None and failed is None:
            counters.add(alone=1)
        compilation = self._workshop.begin(key, asked.home, asked.device, counters, asked.target, lead, failed)
        compilation.note = note
        return compilation

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
        return self.serve(key, device, compile, load) if handle is ABSENT else handle

    def in_memory(self, key: CacheKey, device: DeviceKey) -> Any:
        """The handle of `key` for `device`, or `ABSENT`; the key holds as much of the device as its scope says."""
        handle = self._memory.get(key.digest, device)
        if handle is None:
            return ABSENT
        self.counters.add(requests=1, memory_hits=1, **{by_backend("memory_hits", key.backend): 1})
        return None if handle is _NONE else handle

    def serve(
        self,
        key: CacheKey,
        device: DeviceKey,
        compile: Callable[[Path], Any],
        load: Callable[[Artifact], T] | None = None,
    ) -> Any:
        """As `get_or_compile`, of a key that holds its device, and is not in memory."""
        artifact = self.ensure(key, device, compile)
        assert not isinstance(artifact, Busy)  # told only to who does not wait
        handle = load(artifact) if load else artifact
        kept = self._memory.put(key.digest, device, _NONE if handle is None else handle)
        return None if kept is _NONE else kept

    def ensure(
        self,
        key: CacheKey,
        device: DeviceKey,
        compile: Callable[[Path], Any],
        *,
        wait: bool = True,
        loads: bool = True,
    ) -> Artifact | Busy:
        """As `serve`, of the artifact itself, which is not loaded. Without `wait`: `BUSY` if another rank is at it."""
        asked = Request(key, self.home(key.digest), str(device), device.target, loads=loads)
        found = self.request(asked) if wait else self.attempt(asked)
        return self._run(found, compile) if isinstance(found, Compilation) else found

    def choice(self, key: CacheKey) -> bytes | None:
        """What was chosen for `key`, by whichever rank was first; None if nobody has, or nobody can tell.

        Waits for no other rank; for the agent and the store, seconds at most. The content is as whoever offered it made it:
        untrusted.
        """
        if not self.usable:
            return None
        homes = [choices.store_decided(self.settings.local_dir, key.digest)]
        if self.settings.store is None:
            homes.append(choices.node_decided(self.settings.local_dir, key.digest))
        for home in homes:
            artifact = self._workshop.find(key, home)
            if artifact is not None:
                try:
                    return choices.content_of(key.name, local.read_contents(artifact))
                except ArtifactInvalid as error:
                    let_through(error)
                    self.notices.tell(f"{error}; it is ignored")
                    return None
        return self._client.lookup(key)

    def offer(self, key: CacheKey, content: bytes, seconds: float, device: str = "") -> bytes | None:
        """Offer `content` as what is chosen for `key`; returns what holds from now on, here and wherever the store is read.

        That is `content`, or what another rank offered before. None: nobody keeps it, and it is this process's own.
        `seconds` is what it took to come to it. Not guaranteed: that nodes agree which have no store in common, or whose store
        does not answer.
        """
        if not self.usable:
            return None
        if len(content) > choices.LARGEST_CHOICE:
            self.notices.tell(f"{key.name}: a choice of {len(content)} bytes is too large to be shared")
            return None
        try:
            return self._client.offer(key, content, seconds, device)
        except ProtocolError as error:
            self.notices.tell(f"{key.name} is not shared: {error}")
            return None

    def status(self) -> dict[str, Any] | None:
        """The agent's status; None if no agent runs: none is started for it."""
        return self._client.status(quietly=True, start=False) if self.usable else None

    def stats(self, job: str) -> dict[str, Any] | None:
        """The counters of `job`; None if no agent runs: none is started for it."""
        return self._client.stats(job, quietly=True, start=False) if self.usable else None

    def record(self, recipe: Recipe) -> None:
        """Keep `recipe` for the profile that this job records, if it records one. Thread-safe; costs microseconds.

        Delivered with the statistics, after each compile, and by `close`. Not guaranteed: that what a process recorded after its
        last compile arrives if it is killed.
        """
        self._recorder.record(recipe)

    def close(self) -> None:
        """Deliver statistics and recipes, let go of the agent, and remove private copies. The coordinator may be used again."""
        self._recorder.close()
        self._client.close()
        self._workshop.close()
        self.ahead.close()

    def forget_after_fork(self) -> None:
        self._recorder.forget_after_fork()
        self._memory.forget_after_fork()
        self._workshop.forget_after_fork()
        self.ahead.forget_after_fork()
        self._compiling = _Compiling()

    def _run(self, compilation: Compilation, compile: Callable[[Path], Any]) -> Artifact:
        failed = compilation.failed
        if failed is not None:
            compilation.give_up()
            raise CompileFailed(compilation.key.name, failed.log, failed.where)
        under_way = self._under_way()
        under_way.add(compilation.key.digest)
        try:
            try:
                compile(compilation.staging)
            except OSError as error:
                if interruption_in(error) is not None or not compilation.moves(error):
                    raise
                compile(compilation.staging)
            return compilation.publish(strict=True)
        except BaseException as error:
            if isinstance(error, Exception) and interruption_in(error) is None:
                compilation.fail(traceback.format_exc())
            else:
                compilation.give_up()  # interrupted: that says nothing about the kernel
            raise
        finally:
            under_way.discard(compilation.key.digest)

    def _under_way(self) -> set[str]:
        """The keys that this thread is compiling now."""
        return self._compiling.keys
