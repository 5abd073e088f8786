"""The pool's process: imports the compilers and the kernels' modules once, and forks a worker for each core that has work.

It ends with the process that started it, whose end of its standard input closes; with the agent; or when there is nothing left to
do. All its processes run at a low priority, and are the first that the kernel ends where memory is short.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path

from kcoord.backends.fail_open import notices
from kcoord.backends.registry import install
from kcoord.errors import KcoordError
from kcoord.interruption import let_through
from kcoord.pool.worker import OVER, work
from kcoord.protocol.messages import Join, Joined
from kcoord.rank.client import AgentClient
from kcoord.rank.connect import connect
from kcoord.settings import Settings

_PR_SET_PDEATHSIG = 1
_NICE = 10
_FIRST_TO_END = "900"  # of 1000, for the kernel that is out of memory


def main(starter: int, again: str = "") -> None:
    """Run a pool for the process `starter`, then end this process. `again`: it was started anew to import no modules."""
    control = _taken_stdin()
    with contextlib.suppress(PermissionError):  # it leads a group already
        os.setsid()
    if not again:
        _be_modest()
    with contextlib.suppress(KcoordError):
        settings = Settings.from_environ()
        client = AgentClient(settings, notices)  # the pool is the job's for as long as it is open
        joined = client.ask(Join(), Joined, quietly=True, start=False)
        if joined is not None and joined.workers > 0:
            install()
            if not again:
                _import(joined.modules)
            if threading.active_count() > 1:
                _start_anew(control)  # a fork would copy the locks that a thread holds
            gc.collect()
            gc.freeze()
            _Workers(settings, joined.workers).serve([control, *_pidfd_of(starter)])
    # with the workers, and their compilers; not by an exit, in which imported modules may wait for their threads
    os.killpg(0, signal.SIGKILL)


class _Workers:
    """At most `most` workers: as many as are busy, and one more, which waits for work."""

    def __init__(self, settings: Settings, most: int) -> None:
        self._settings, self._most = settings, most
        self._busy: dict[int, bool] = {}  # by the descriptor on which each worker says so, until it closes
        self._pids: dict[int, int] = {}
        self._over = False

    def serve(self, until: list[int]) -> None:
        """Return when one of the descriptors `until` can be read, or the last worker has ended because there is nothing to do."""
        while not self._over or self._busy:
            if not self._over and len(self._busy) < self._most and all(self._busy.values()):
                self._fork()
            ready, _, _ = select.select([*until, *self._busy], [], [])
            if not set(ready).isdisjoint(until):
                break
            for worker in ready:
                self._heard(worker)

    def _fork(self) -> None:
        ours, theirs = os.pipe()
        pid = os.fork()
        if not pid:
            _be_worker(self._settings, theirs)
        os.close(theirs)
        self._busy[ours], self._pids[ours] = False, pid

    def _heard(self, worker: int) -> None:
        said = os.read(worker, 4096)
        if said:
            self._busy[worker] = said.endswith(b"+")
            return
        os.close(worker)
        _, status = os.waitpid(self._pids.pop(worker), 0)
        code, at_work = os.waitstatus_to_exitcode(status), self._busy.pop(worker)
        self._over = (
            self._over or code == OVER or (code != 0 and not at_work)
        )  # a recipe may end its worker, and no other


def _be_worker(settings: Settings, busy: int) -> None:
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # what kills the pool's process ends its workers
        os.set_blocking(busy, False)
        code = work(settings, lambda begins: _say(busy, b"+" if begins else b"-"))
        connect().close()  # delivers counters and spans
    except KcoordError:
        code = OVER
    finally:
        os._exit(code)


def _say(busy: int, state: bytes) -> None:
    try:
        os.write(busy, state)
    except BrokenPipeError:
        os._exit(0)  # the pool's process was killed


def _be_modest() -> None:
    os.nice(_NICE)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_FIRST_TO_END)


def _import(modules: list[object]) -> None:
    for name in modules:
        try:
            import_module(str(name))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything; the worker says so
            let_through(error)


def _start_anew(control: int) -> None:
    os.dup2(control, 0)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], "again"])


def _taken_stdin() -> int:
    """Move the standard input to another descriptor, where neither a module nor a compiler reads it by mistake."""
    control, nothing = os.dup(0), os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return control


def _pidfd_of(process: int) -> list[int]:
    """A descriptor that is readable once `process` has ended, even if another process holds its end of the input.

    Empty on a kernel without pidfd.
    """
    try:
        return [os.pidfd_open(process)]
    except ProcessLookupError:
        os._exit(0)
    except OSError:
        return []
