"""One compile of this rank: its files are staged, and become the artifact.

No fault of the agent or of a disk comes through here: files that cannot be published stay where they are, for this process alone.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kcoord.artifacts import local
from kcoord.artifacts.arch import contradiction, recorded_targets
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import Origin
from kcoord.errors import ArtifactInvalid, CompileFailed, StoreError
from kcoord.interruption import interruption_in, let_through
from kcoord.keys.cache_key import CacheKey
from kcoord.keys.device import GPUTarget
from kcoord.rank.client import AgentClient, Failed, Lead
from kcoord.rank.directories import Directories, directory_held
from kcoord.telemetry.events import Notices

T = TypeVar("T")
U = TypeVar("U")

_MOST_MOVES = 3
_PRIVATE = "its files are in a temporary directory of its process"


class _Running(threading.local):
    """Digests of the keys that the current thread compiles by `Compilation.run`."""

    def __init__(self) -> None:
        self.digests: set[str] = set()


_running = _Running()


def _forget_after_fork() -> None:
    global _running
    _running = _Running()


os.register_at_fork(after_in_child=_forget_after_fork)


def is_running(digest: str) -> bool:
    """True if the current thread compiles this key: a compile that asks for its own key would wait for itself."""
    return digest in _running.digests


@dataclass(frozen=True)
class CompilationContext:
    """Parts that the compilations of a process share. ``ended(compilation, seconds)`` is called once for each.

    `find` is `Coordinator.find`.
    """

    client: AgentClient
    notices: Notices
    directories: Directories
    find: Callable[..., Artifact | None]
    ended: Callable[[Compilation, float], None]


@dataclass
class Compilation:
    """The task of compiling `key` into `staging`. End it with exactly one of `publish`, `use_privately`, `refuse_sharing`, `fail`
    and `give_up`; if it is not `shared`, with `use_privately`.

    `run` does all of that for a compile that is one function. `failed`: another rank's compile of the key failed a moment ago, as
    its agent says; compile anyway. `target` is the GPU that was asked for, if it is known. `outcome`, once it has ended, `note`,
    the reason why nobody coordinates it, and `aside` are for its span (`kcoord.telemetry.spans`). In a child that was forked from
    `process`, ending it has no effect for other ranks.
    """

    context: CompilationContext
    key: CacheKey
    home: Path
    staging: Path
    device: str
    aside: bool
    target: GPUTarget | None = None
    lead: Lead | None = None
    failed: Failed | None = None
    note: str = ""
    shared: bool = True
    started: float = field(default_factory=time.perf_counter)
    ended: bool = False
    outcome: str = "ok"
    process: int = field(default_factory=os.getpid)

    def run(self, compile: Callable[[Path], T], finish: Callable[[T], U], *, raises_errors: bool = False) -> U:
        """``finish(compile(staging))``. A compile is repeated, in another directory, if the disk refused or lost its files: at
        most `_MOST_MOVES` times, since the local directory and the temporary one may go one after the other.

        Re-raises an exception of either, after the other ranks were told of it; with `raises_errors`, as the cause of
        `CompileFailed` if another rank had failed, too. An interruption (a signal handler's exception, KeyboardInterrupt) is no
        failure of the kernel: the next rank compiles.
        """
        _running.digests.add(self.key.digest)
        try:
            for _ in range(_MOST_MOVES):
                with directory_held(self.staging) as is_lost:
                    try:
                        made = compile(self.staging)
                        if not is_lost():
                            return finish(made)
                        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(self.staging))
                    except Exception as error:  # a lost directory is worded as its compiler likes
                        if interruption_in(error) is not None or not self._moves(error, is_lost()):
                            raise
            return finish(compile(self.staging))
        except BaseException as error:
            self.raised(error)
            if raises_errors and self.failed is not None and self.outcome == "failed":
                raise CompileFailed(self.key.name, self.failed.log, self.failed.where) from error
            raise
        finally:
            _running.digests.discard(self.key.digest)

    def raised(self, error: BaseException) -> None:
        """The compiler raised `error`: fail with its traceback, or give up if it is an interruption."""
        if isinstance(error, Exception) and interruption_in(error) is None:
            self.fail("".join(traceback.format_exception(error)))
        else:
            self.give_up()

    def _moves(self, error: Exception, lost: bool) -> bool:
        """True if `staging` is `lost`, or its disk caused `error`: then it is another directory, without the staged files."""
        if self.process != os.getpid() or self.ended:
            return False
        directories, instead = self.context.directories, None
        if lost:
            instead = directories.instead_of_lost(self.staging)
        elif isinstance(error, OSError):
            instead = directories.instead_of(self.staging, error)
        self.staging = instead or self.staging
        return instead is not None

    def publish(self, *, strict: bool = False) -> Artifact:
        """Make the staged files the artifact. If that is impossible they stay in `staging`, for this process alone.

        So do files that record another GPU than `target`; then every rank compiles for itself. `strict` raises
        `ArtifactInvalid` for these, and the compilation is to end with `fail`. Raises `ArtifactInvalid` if nothing was staged.
        """
        took = time.perf_counter() - self.started
        if self.ended:
            raise ArtifactInvalid(f"{self.key.name} was published or failed before")
        astray = self._astray()
        if astray and strict:
            raise ArtifactInvalid(f"{astray}: compile for the current device, or pass the target= that it is for")
        self.ended = True
        try:
            return self._withhold(took, astray) if astray else self._settle(took)
        except BaseException:
            self.ended = os.path.lexists(self.staging)  # else somebody has removed the files, and `run` compiles again
            raise
        finally:
            if self.lead is not None and not self.lead.ended:  # interrupted before the agent was asked to publish
                self.context.client.give_up(self.lead, self.key)
            if self.ended:
                self.context.ended(self, took)

    def use_privately(self, why: str = "") -> None:
        """Use the staged files where they are, for this process alone, until it ends. `why` they are not shared is for people."""
        self.ended, self.outcome = True, "private"
        self.note = why or self.note
        took = time.perf_counter() - self.started
        self.context.directories.keep(self.staging)
        if self.lead is not None:
            self.context.client.give_up(self.lead, self.key, why or _PRIVATE)
        self.context.ended(self, took)

    def refuse_sharing(self, why: str) -> None:
        """Nothing of this compile is shared, though it did not fail: waiting ranks compile for themselves, at once."""
        self._end("private", lambda lead: self.context.client.fail(lead, self.key, why))

    def as_artifact(self) -> Artifact:
        """The files that `use_privately` kept, as an artifact of this process. Raises `ArtifactInvalid` if there are none."""
        return self._adopt(time.perf_counter() - self.started)

    def fail(self, log: str) -> None:
        """The compiler failed; `log` is what it printed, or its traceback."""
        self._end("failed", lambda lead: self.context.client.fail(lead, self.key, log))

    def give_up(self) -> None:
        """Nothing was compiled, and nothing failed."""
        self._end("given up", lambda lead: self.context.client.give_up(lead, self.key))

    def _end(self, outcome: str, answer: Callable[[Lead], None]) -> None:
        if self.ended:
            return
        self.ended, self.outcome = True, outcome
        took = time.perf_counter() - self.started
        if self.process != os.getpid():
            return  # the parent still compiles
        if self.lead is not None:
            answer(self.lead)  # first: others wait
        shutil.rmtree(self.staging, ignore_errors=True)
        self.context.ended(self, took)

    def _astray(self) -> str:
        """The contradiction between `target` and the staged files; empty if there is none."""
        if self.target is None or not self.context.directories.is_shared(self.staging):
            return ""
        try:
            astray = contradiction(recorded_targets(self.staging), self.target)
        except OSError:
            return ""  # publishing meets it too, and names the cause
        return astray and f"{self.key.name} was compiled {astray}"

    def _withhold(self, took: float, why: str) -> Artifact:
        """For this process alone, as without kcoord; waiting ranks compile for themselves, at once."""
        self.context.notices.tell(f"{why}: it is not shared")
        if self.lead is not None:
            self.context.client.fail(self.lead, self.key, why)
        self.context.directories.keep(self.staging)
        return self._adopt(took)

    def _settle(self, took: float) -> Artifact:
        """Publish through the agent, without one directly; if that is impossible, use the staged files where they are."""
        key, home, staging, context = self.key, self.home, self.staging, self.context
        if not context.directories.is_shared(staging):
            if self.lead is not None:
                self.note = _PRIVATE
                context.client.give_up(self.lead, key, _PRIVATE)
            return self._adopt(took)
        published = context.client.publish(self.lead, key, staging, home, took, self.device)
        # also if no answer came: the agent may have ended between rename and reply
        artifact = context.find(key, home, self.target, published=published)
        if artifact is not None:
            return artifact
        context.directories.keep(staging)  # removed at the end of this process, unless it is published after all
        try:
            return local.publish_local(staging, home, key, took, Origin.here(0, None, self.device))
        except (StoreError, ArtifactInvalid) as error:
            let_through(error)
            artifact = context.find(key, home, self.target)  # an agent that was slow, and is not dead, was faster
            if artifact is not None:
                return artifact
            if isinstance(error, ArtifactInvalid):
                raise
            context.notices.tell(
                f"{error}; kernels stay with this process", about=f"not published here: {error.remedy}"
            )
        return self._adopt(took)

    def _adopt(self, took: float) -> Artifact:
        self.outcome = "private"
        return local.adopt(self.staging, self.key, took, Origin.here(0, None, self.device))
