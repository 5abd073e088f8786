"""The start of the node's pool, by a launcher before its ranks, or by a rank: the agent lets one process of a job do it.

The pool has the interpreter, the modules and the variables of the process that starts it, and ends with that process, which never
waits for it. It is forked twice, by way of a shell, and so no child of a rank: a training script may wait for all its children
(``os.wait()``), or be confused by one that it did not start. Such a script may see the shell end, which takes a millisecond.
"""

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcoord.cgroups import cores
from kcoord.errors import KcoordError
from kcoord.interruption import let_through
from kcoord.keys.device import GPUTarget
from kcoord.packs.recipe import Recipe
from kcoord.protocol.messages import Announce, Granted
from kcoord.protocol.own_socket import OwnSocket
from kcoord.rank.client import AgentClient, forgets_after_fork
from kcoord.ranks import POOL_SCRIPT
from kcoord.settings import NO_PROFILE, Settings, variable
from kcoord.telemetry.events import Notices

NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1", "ROCR_VISIBLE_DEVICES": ""}
"""Importing a module may touch the GPU, whose memory is the job's."""

_RENDEZVOUS = ("MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "PRTE_", "ORTE_", "HYDRA_", "MPIEXEC_")
"""With these, a module may join the process group or MPI's world, as a second process of the rank's number."""

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[4:]; "  # before anything is imported from the working directory
    "from kcoord.replay.process import main; "
    "main(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]))"
)
# a shell gives its background job no standard input
_BESIDE = '[ -x "$1" ] || exit 127; exec 3<&0; "$@" <&3 3<&- &'
_FAILURES = (KcoordError, OSError, ValueError, RuntimeError, subprocess.SubprocessError)
_START = 5.0  # seconds for the shell to start it; it takes one or two milliseconds
_MOST_BYTES = 1 << 20  # of the recipes in one message
_QUESTIONS, _PAUSE = 50, 0.1  # seconds between two, as long as there is no agent
_MOST_THREADS = 4  # that ask
_ENOUGH_CORES = 4  # with fewer, a pool that must be started first takes more from the ranks than it gives
_ASK_AGAIN = 30.0  # seconds between two questions whether a pool is wanted


def has_cores_to_spare(ranks: int) -> bool:
    """True if a pool is worth its start before the ranks: else they leave no core idle."""
    return cores() >= 2 * ranks


@dataclass(frozen=True)
class Ranks:
    """The ranks that a launcher is about to start: their `sys.path`, script and environment, and the packages that the script
    imports, as far as they are known."""

    path: Sequence[str]
    script: str
    environ: Mapping[str, str]
    packages: Collection[str]


class PoolStart:
    """Tells the agent which keys are upcoming, and starts the pool that compiles them if the agent says so.

    `stuck` seconds without progress end a pool's workers, and `grown` bytes of growth one of them. Thread-safe and fork-safe. Not
    guaranteed: that a pool starts, or compiles anything.

    `ranks` are those that a launcher's pool is for; None: this process is a rank. ``at_miss()`` is called by `missed`.
    """

    def __init__(
        self,
        settings: Settings,
        notices: Notices,
        client: AgentClient,
        ranks: Ranks | None = None,
        stuck: float = 30.0,
        grown: int = 1 << 30,
    ) -> None:
        self._settings, self._notices, self._client, self._ranks = settings, notices, client, ranks
        self._limits = str(stuck), str(grown)
        self._wanted = settings.pool_workers > 0 and not settings.disable
        self._warms_up = False
        self._lock, self._threads = threading.Lock(), 0  # the lock is held while a thread asks, and starts the pool
        self._asked = -_ASK_AGAIN
        self._control: OwnSocket | None = None  # the pool ends when this closes
        self.at_miss: Callable[[], object] = lambda: None
        forgets_after_fork(self)

    def missed(self, target: GPUTarget | None) -> None:
        """A key for `target` is not on this node: the rest of the profile may be missing, too. Returns at once."""
        self.at_miss()
        if not self._wanted or (self._settings.recorded_as is None and not self._warms_up):
            return
        if time.monotonic() > self._asked + _ASK_AGAIN:
            self._asked = time.monotonic()
            self.start_soon(target="" if target is None else str(target))

    @contextmanager
    def warms_up(self, workers: int) -> Iterator[PoolStart]:
        """In the block the first miss starts a pool, whatever the settings say, if it is to have any `workers`."""
        before, self._wanted = self._wanted, workers > 0
        self._asked, self._warms_up = -_ASK_AGAIN, True
        try:
            yield self
        finally:
            self._wanted, self._warms_up = before, False

    @property
    def has_started(self) -> bool:
        """True if this process started the job's pool."""
        return self._control is not None

    @property
    def takes_announcements(self) -> bool:
        """False where `announce` does nothing: no pool is wanted, or no core would be left for one."""
        return self._wanted and cores() >= _ENOUGH_CORES

    def announce(self, recipes: Sequence[Recipe]) -> None:
        """This process is about to use `recipes`. Returns at once."""
        if recipes and self.takes_announcements:
            self.start_soon(recipes)

    def start_soon(self, recipes: Sequence[Recipe] = (), **how: Any) -> None:
        """`start`, in a thread. Not guaranteed: that it happens, while an agent does not answer those that ask already."""

        def ask() -> None:
            try:
                with self._lock:
                    self.start(recipes, **how)
            finally:
                self._threads -= 1

        if self._threads >= _MOST_THREADS:
            return
        self._threads += 1  # not exact, if two threads come at once
        try:
            threading.Thread(target=ask, name="kcoord-pool", daemon=True).start()
        except RuntimeError as error:  # this user may have no more threads, or the interpreter ends
            self._threads -= 1
            let_through(error)

    def start(self, recipes: Sequence[Recipe] = (), **how: Any) -> None:
        """Announce the profile, and `recipes`, with the fields `how` of `Announce`; start the pool if this process is to.

        Without a profile that is known, the modules that this process has imported, or the ranks' packages, are announced. A job
        of which nothing is known has no pool: its process would take the memory of the compilers that it imports.
        """
        if not self._wanted:
            return
        try:
            if self._announced(recipes, how):
                ranks = self._ranks or Ranks(sys.path, _script(), os.environ, ())
                self._replace(OwnSocket(self._started(ranks)))
        except _FAILURES as error:
            let_through(error)
            self._wanted = False
            self._notices.tell(f"nothing is compiled ahead: {error}")

    def _announced(self, recipes: Sequence[Recipe], how: dict[str, Any]) -> bool:
        """True if this process is to start the pool."""
        profile, sizes = self._settings.recorded_as, itertools.accumulate(recipe.size for recipe in recipes)
        first = [recipe.to_wire() for recipe, size in zip(recipes, sizes, strict=True) if size < _MOST_BYTES]
        answer = self._ask(Announce(first, profile, cores=cores(), **how))
        if answer is None:
            return False
        modules = [
            name
            for name in answer.modules
            if (name.partition(".")[0] in self._ranks.packages if self._ranks else name in sys.modules)
        ]
        if modules and self.takes_announcements:
            again = self._ask(Announce(profile=profile, modules=modules, cores=cores(), **how))
            return answer.granted or (again is not None and again.granted)
        return answer.granted

    def _ask(self, announced: Announce) -> Granted | None:
        """The agent's answer. It is not started for this, nor found dead: a claim may be starting it meanwhile."""
        for _ in range(_QUESTIONS):
            answer = self._client.ask(announced, Granted, quietly=True, start=False)
            if answer is not None:
                return answer
            time.sleep(_PAUSE)
        return None

    def close(self) -> None:
        """End the pool, if this process started it, without waiting. Ranks take over its compiles, as after any death."""
        self._replace(None)

    def forget_after_fork(self) -> None:
        """The pool is the parent's, which it would outlive if a child kept its control open."""
        self._lock, self._threads = threading.Lock(), 0
        self._replace(None)  # the child's copy only

    def _replace(self, control: OwnSocket | None) -> None:
        before, self._control = self._control, control
        if before is not None:
            before.close()

    def _started(self, ranks: Ranks) -> socket.socket:
        if not sys.executable or getattr(sys, "frozen", False):
            raise RuntimeError("this process knows no Python interpreter to start")
        program = [sys.executable, *["-O"] * sys.flags.optimize, *self._program(ranks.path)]
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                shell = subprocess.Popen(
                    ["/bin/sh", "-c", _BESIDE, "sh", *program],
                    env=_environment(self._settings, ranks.environ) | {POOL_SCRIPT: ranks.script},
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
            try:
                if shell.wait(_START):
                    raise RuntimeError(f"{sys.executable} cannot be started")
            except subprocess.TimeoutExpired:
                shell.kill()
                raise
        except BaseException:
            ours.close()
            raise
        return ours

    def _program(self, path: Sequence[str]) -> list[str]:
        """The interpreter's arguments."""
        entries = [entry for entry in path if isinstance(entry, str)]  # Python ignores others, too
        return ["-c", _PROGRAM, str(os.getpid()), *self._limits, *entries]


def _environment(settings: Settings, environ: Mapping[str, str]) -> dict[str, str]:
    """The rank's, with `settings`; but a pool joins no process group, records nothing, and starts no pool."""
    kept = {name: value for name, value in environ.items() if not name.startswith(_RENDEZVOUS)}
    return {
        **kept,
        **settings.to_environ(),
        **NO_GPU,
        variable("pool_workers"): "0",
        variable("spawn"): "0",  # an agent that a worker started would have its low priority, and these settings
        variable("profile"): NO_PROFILE,
    }


def _script() -> str:
    """The path of the script that this process runs; empty in a shell."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return str(Path.cwd() / file) if isinstance(file, str) else ""
