"""A rank's own compile: where its files are staged, and how they become the artifact.

No fault of the agent or of a disk comes through here: what cannot be published is used where it is, by this process alone.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kcoord.artifacts import local
from kcoord.artifacts.arch import contradiction, recorded_targets
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import Origin
from kcoord.errors import ArtifactInvalid, ArtifactUnreadable, StoreError
from kcoord.files.faults import (
    store_error,
)
from kcoord.files.rename import (
    write_files,
)
from kcoord.interruption import let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import GPUTarget
from kcoord.rank import client as agent
from kcoord.telemetry.counters import Counters
from kcoord.telemetry.events import Notices

_LEAST_ROOM = 4 << 20  # bytes that a disk must have free for a compile to begin there
_SPARED = 64 << 20  # bytes of one compile that are kept in memory while they are handed in


@dataclass
class Compilation:
    """This rank is to compile `key` into `staging`, then call exactly one of `publish`, `fail` and `give_up`.

    `failed` is set if another rank's compile of the key failed a moment ago: compile anyway, to raise the compiler's own
    exception, or raise `CompileFailed`. `target` is the GPU that was asked for, if it is known. `outcome`, once it has ended, and
    `note`, which says why nobody coordinates it, are for the time line (`kcoord.telemetry.spans`). In a process that was forked
    from `process` its end is nobody's.
    """

    workshop: Workshop
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
    outcome: str = "ok"
    note: str = ""
    process: int = field(default_factory=os.getpid)

    def moves(self, error: OSError) -> bool:
        """Whether `error` came of the disk below `staging`; then what was staged is void, and `staging` another directory."""
        return self.workshop.moves(self, error)

    def publish(self, *, strict: bool = False) -> Artifact:
        """Make the staged files the artifact. If that is impossible they stay in `staging`, for this process alone.

        So do files that say of themselves that they are for another GPU than `target`; then every rank compiles for itself.
        `strict` raises `ArtifactInvalid` for these, and the compilation is to end with `fail`. Raises `ArtifactInvalid` if
        nothing was staged.
        """
        took = time.perf_counter() - self.started
        return self.workshop.publish(self, took, strict)

    def keep(self) -> None:
        """Use the staged files where they are, for this process alone, until it ends."""
        self.workshop.keep(self)

    def fail(self, log: str) -> None:
        """The compiler failed, and said `log`."""
        self.workshop.end(self, "failed", lambda client, lead: client.fail(lead, self.key, log))

    def give_up(self) -> None:
        """Nothing was compiled, and nothing failed."""
        self.workshop.end(self, "given up", lambda client, lead: client.give_up(lead, self.key))


class Workshop:
    """Where one process compiles. `shares` is false if kcoord is off here: then everything stays with this process.

    ``ended(compilation, amounts)`` is told once of each compilation, with what is to be counted.
    """

    def __init__(
        self,
        client: agent.AgentClient,
        notices: Notices,
        shares: Callable[[], bool],
        ended: Callable[[Compilation, dict[str, float]], None],
    ) -> None:
        self._client, self._notices, self._shares, self._ended = client, notices, shares, ended
        self._private: list[Path] = []  # directories that this process still loads from

    def begin(
        self,
        key: CacheKey,
        home: Path,
        device: str,
        counters: Counters,
        target: GPUTarget | None = None,
        lead: agent.Lead | None = None,
        failed: agent.Failed | None = None,
    ) -> Compilation:
        """The task of compiling `key`, whose time begins now."""
        return Compilation(
            self, key, home, self._staging(home), device, counters, target, lead, failed, time.perf_counter()
        )

    def find(
        self,
        key: CacheKey,
        home: Path,
        target: GPUTarget | None = None,
        missing: Callable[[Path], object] = lambda home: None,
    ) -> Artifact | None:
        """The artifact at `home` if it verifies, and does not say that it is for another GPU than `target`.

        One that fails is moved into quarantine. ``missing(home)`` is called if there is none.
        """
        try:
            artifact = local.open_artifact(home, key.digest)
            if artifact is None:
                missing(home)
            astray = contradiction(artifact.manifest.targets, target) if artifact is not None else ""
            if astray:
                raise ArtifactInvalid(f"{home} holds code {astray}")
            return artifact
        except ArtifactUnreadable as error:  # others may well read it
            let_through(error)
            self._notices.tell(f"{error}; it is compiled again")
            return None
        except ArtifactInvalid as error:
            let_through(error)
            self._notices.tell(f"{error}; it is compiled again")
        try:
            local.quarantine(home)
        except StoreError as error:
            let_through(error)
            self._notices.tell(str(error))
        return None

    def _staging(self, home: Path) -> Path:
        if self._shares():
            try:
                return local.new_staging(home, _LEAST_ROOM)
            except StoreError as error:
                let_through(error)
                self._notices.tell(
                    f"{error}; this process keeps its kernels in a temporary directory",
                    about=f"the local directory: {error.remedy}",
                )
        return self.private_directory()

    def moves(self, compilation: Compilation, error: OSError) -> bool:
        """See `Compilation.moves`."""
        staging = compilation.staging
        others = compilation.process != os.getpid()
        if others or staging in self._private or compilation.ended or local.takes_files(staging, _LEAST_ROOM):
            return False
        self._notices.tell(
            f"{store_error(error, staging.parent)}; this process keeps its kernels in a temporary directory",
            about=f"the local directory: {store_error(error, staging).remedy}",
        )
        shutil.rmtree(staging, ignore_errors=True)
        compilation.staging = self.private_directory()
        return True

    def private_directory(self) -> Path:
        """A new directory in the temporary directory, which lasts as long as this process."""
        directory = Path(tempfile.mkdtemp(prefix="kcoord-"))
        self._private.append(directory)
        return directory

    def publish(self, compilation: Compilation, took: float, strict: bool) -> Artifact:
        """See `Compilation.publish`; so are the two below."""
        if compilation.ended:
            raise ArtifactInvalid(f"{compilation.key.name} was published or failed before")
        astray = self._astray(compilation)
        if astray and strict:
            raise ArtifactInvalid(f"{astray}: compile for the current device, or pass the target= that it is for")
        compilation.ended = True
        try:
            return self._withhold(compilation, took, astray) if astray else self._settle(compilation, took)
        except BaseException:
            if compilation.lead is not None and not compilation.lead.ended:  # interrupted before it was handed in
                self._client.give_up(compilation.lead, compilation.key)
            raise
        finally:
            self._ended(compilation, {"compiles": 1, "compile_seconds": took})

    def _astray(self, compilation: Compilation) -> str:
        """What the staged files say that contradicts what was asked for; empty if nothing does."""
        if compilation.target is None or not self._shares():
            return ""
        try:
            astray = contradiction(recorded_targets(compilation.staging), compilation.target)
        except OSError:
            return ""  # publishing meets it too, and says what is wrong
        return astray and f"{compilation.key.name} was compiled {astray}"

    def _withhold(self, compilation: Compilation, took: float, why: str) -> Artifact:
        """For this process alone, as without kcoord; who waits compiles for itself, at once."""
        compilation.outcome = "private"
        self._notices.tell(f"{why}: it is not shared")
        if compilation.lead is not None:
            self._client.fail(compilation.lead, compilation.key, why)
        self._private.append(compilation.staging)
        return local.adopt(compilation.staging, compilation.key, took, Origin.here(0, None, compilation.device))

    def _settle(self, compilation: Compilation, took: float) -> Artifact:
        """Publish; if the disk refuses, use the staged files where they are; if it lost them, what was read before."""
        staging = compilation.staging
        if self._shares() and staging not in self._private:
            spare = _contents(staging)
            try:
                return self._hand_in(compilation, took)
            except ArtifactInvalid as error:
                if not spare or any(_holds(d, spare) for d in (staging, _own(staging))):
                    raise
                self._notices.tell(
                    f"{error}; its files have vanished, and are used from memory: does something clean {staging.parent}?"
                )
            staging = self.private_directory()
            write_files(staging, spare, durable=False)
        elif compilation.lead is not None:  # whoever waits cannot load what is only ours
            self._client.give_up(compilation.lead, compilation.key)
        return self._adopt(compilation, staging, took)

    def _hand_in(self, compilation: Compilation, took: float) -> Artifact:
        """Publish through the agent; without one directly; if the disk refuses, use the staged files where they are."""
        key, home, staging = compilation.key, compilation.home, compilation.staging
        self._client.publish(compilation.lead, key, staging, home, took, compilation.device)
        # also if no answer came: the agent may have ended between rename and reply
        artifact = self.find(key, home, compilation.target)
        if artifact is not None:
            return artifact
        try:
            # a name that only we know: an agent that is slow, and not dead, may still move the one that it was given
            staging = staging.rename(_own(staging))
        except FileNotFoundError:
            artifact = self.find(key, home, compilation.target)  # it was faster, this very moment
            if artifact is not None:
                return artifact
        except OSError as error:
            let_through(error)
            self._notices.tell(f"{error}; the kernel stays with this process")
        self._private.append(staging)  # removed at the end of this process, unless it is published after all
        try:
            return local.publish_local(staging, home, key, took, Origin.here(0, None, compilation.device))
        except StoreError as error:
            let_through(error)
            self._notices.tell(f"{error}; kernels stay with this process", about=f"not published here: {error.remedy}")
        return self._adopt(compilation, staging, took)

    def _adopt(self, compilation: Compilation, staging: Path, took: float) -> Artifact:
        compilation.outcome = "private"
        return local.adopt(staging, compilation.key, took, Origin.here(0, None, compilation.device))

    def keep(self, compilation: Compilation) -> None:
        compilation.ended, compilation.outcome = True, "private"
        took = time.perf_counter() - compilation.started
        self._private.append(compilation.staging)
        if compilation.lead is not None:  # whoever waits cannot load what is only ours
            self._client.give_up(compilation.lead, compilation.key)
        self._ended(compilation, {"compiles": 1, "compile_seconds": took})

    def end(
        self, compilation: Compilation, outcome: str, tell: Callable[[agent.AgentClient, agent.Lead], None]
    ) -> None:
        if compilation.ended:
            return
        compilation.ended, compilation.outcome = True, outcome
        if compilation.process != os.getpid():
            return  # of the process that forked this one, which is at it still
        if compilation.lead is not None:
            tell(self._client, compilation.lead)  # first: others wait
        shutil.rmtree(compilation.staging, ignore_errors=True)
        self._ended(compilation, {"failures": 1})

    def close(self) -> None:
        """Remove what only this process loaded from."""
        private, self._private = self._private, []
        for directory in private:
            shutil.rmtree(directory, ignore_errors=True)

    def forget_after_fork(self) -> None:
        """The parent's private copies are its own to remove."""
        self._private = []


def _own(staging: Path) -> Path:
    return staging.with_name(f"{staging.name}-own")


def _contents(staging: Path) -> dict[str, bytes]:
    """The staged files; empty if they are too large to be kept in memory, or cannot be read."""
    found: dict[str, bytes] = {}
    try:
        paths = [p for p in staging.rglob("*") if p.is_file() and not p.is_symlink()]
        if sum(p.stat().st_size for p in paths) <= _SPARED:
            found = {p.relative_to(staging).as_posix(): p.read_bytes() for p in paths}
    except OSError as error:
        let_through(error)
        return {}
    return found


def _holds(directory: Path, contents: dict[str, bytes]) -> bool:
    return all((directory / name).is_file() for name in contents)
