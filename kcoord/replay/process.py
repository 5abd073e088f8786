"""The pool's processes: one that watches; one that imports the compilers and the kernels' modules, and forks; and its workers.

All of them end with the process that started the pool, whose end of its standard input closes; with the agent; or when there is
nothing left to do. They run at a low priority, and are the first that the kernel ends where memory is short.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

from kcoord.backends.fail_open import notices
from kcoord.backends.registry import install
from kcoord.cgroups import IdleCores, cores
from kcoord.errors import KcoordError
from kcoord.interruption import let_through
from kcoord.protocol.messages import Join, Joined
from kcoord.rank.client import AgentClient
from kcoord.replay.worker import IDLE, MISSES, OVER, work
from kcoord.settings import Settings
from kcoord.stalls import Stalls

_ANEW = 4
"""The exit code of a process whose workers wait for locks that its modules' threads held when it forked. Another imports none."""
_PR_SET_PDEATHSIG = 1
_NICE = 10
_FIRST_TO_END = "900"  # of 1000, for the kernel that is out of memory
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
"""While modules are imported: the fewer threads, the fewer locks that a fork copies."""


def main(starter: int, stuck: float, grown: int) -> None:
    """Run a pool for the process `starter`, then end this process and all that it began.

    Workers that use no CPU for `stuck` seconds are
    killed: they may hold a lock copied by fork. `grown`: see `work`.
    """
    control = _taken_stdin()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would hide the exit codes of compilers
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # the script's; Slurm sends them to every process of a step
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # refused, or it leads a group already
        os.setsid()
    _be_modest()
    try:
        imports = True
        while True:
            ours, theirs = os.pipe()
            child = _forked(lambda: _Forks(theirs, imports, stuck, grown).serve(), (ours, control))  # noqa: B023
            os.close(theirs)
            ready, _, _ = select.select([control, *_pidfd_of(starter), ours], [], [])
            os.close(ours)
            if ours not in ready:
                break
            _, status = os.waitpid(child, 0)
            if os.waitstatus_to_exitcode(status) != _ANEW or not imports:
                break
            imports = False
    finally:
        if os.getpgrp() == os.getpid():
            os.killpg(0, signal.SIGKILL)  # workers, their compilers, and this process
        os._exit(0)


class _Forks:
    """Forks workers: one; after the first miss as many as are busy, and one more, which waits for work. `alive` closes when this
    process ends.

    Without `imports` it imports nothing, since an earlier process's imports left threads that held locks.
    """

    def __init__(self, alive: int, imports: bool, stuck: float, grown: int) -> None:
        self._alive, self._imports, self._stuck, self._grown = alive, imports, stuck, grown
        # by the descriptor on which each worker says so, until it closes; None: it has not begun
        self._busy: dict[int, bool | None] = {}
        self._pids: dict[int, int] = {}
        self._over = self._has_missed = False

    def serve(self) -> int:
        """Return the exit code: when the last worker has ended because there is nothing to do, or when workers are stuck."""
        settings, idle = Settings.from_environ(), IdleCores()
        client = AgentClient(settings, notices)  # the pool is the job's for as long as it is open
        install()
        joined = client.ask(Join(), Joined, quietly=True, start=False)  # answered when there is work
        if joined is None or joined.workers < 1:
            return OVER
        most = max(1, min(joined.workers, int(cores())))
        if self._imports:
            _import(joined.modules)
        # a library's idle threads hold no locks, most often; a fork would copy a lock that is held for ever
        stalls = Stalls[int](self._stuck) if len(os.listdir("/proc/self/task")) > 1 else None  # noqa: PTH208
        looked, looks_again = time.monotonic(), self._stuck / 4  # a look reads all of /proc for each worker
        gc.collect()
        gc.freeze()
        while not self._over or self._busy:
            wanted = most if self._has_missed else 1
            if not self._over and len(self._busy) < wanted and all(self._busy.values()):
                try:
                    self._fork(settings, idle)
                except OSError:  # this user may have no more processes
                    most = len(self._busy)
                    self._over = not most
            patience = 0 if self._over and not self._busy else looks_again if stalls else None
            ready, _, _ = select.select(list(self._busy), [], [], patience)
            for worker in ready:
                self._heard(worker)
            now = time.monotonic()
            if stalls and now > looked + looks_again:
                looked = now
                working = {pid: f"/proc/{pid}" for worker, pid in self._pids.items() if self._busy[worker] is not False}
                if working and len(stalls.look(working, now)) == len(working):
                    for pid in self._pids.values():
                        os.kill(pid, signal.SIGKILL)
                    return _ANEW
        return OVER

    def _fork(self, settings: Settings, idle: IdleCores) -> None:
        ours, theirs = os.pipe()

        def be_worker() -> int:
            return work(settings, idle, lambda state: os.write(theirs, state), self._grown)

        try:
            pid = _forked(be_worker, (ours, self._alive, *self._busy))
        except OSError:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        self._busy[ours], self._pids[ours] = None, pid

    def _heard(self, worker: int) -> None:
        said = os.read(worker, 4096)
        if said:
            self._has_missed = self._has_missed or MISSES in said
            self._busy[worker] = not said.endswith(IDLE)
            return
        os.close(worker)
        _, status = os.waitpid(self._pids.pop(worker), 0)
        code, at_work = os.waitstatus_to_exitcode(status), self._busy.pop(worker)
        # a worker that ends while it is idle ends the pool; one that dies compiling does not, also with the code OVER
        self._over = self._over or (code != 0 and not at_work)


def _forked(run: Callable[[], int], not_theirs: tuple[int, ...]) -> int:
    """Run ``run()`` in a child, without the descriptors `not_theirs`; its result is the exit code. Returns the child's id.

    The child ends with this process, however that ends.
    """
    parent = os.getpid()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns of threads
        pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            for descriptor in not_theirs:
                os.close(descriptor)
            code = run()
    except KcoordError:
        code = OVER
    finally:
        os._exit(code)  # skips the exit of imported modules, which may wait for their threads


def _be_modest() -> None:
    os.nice(_NICE)
    for file, value in (("autogroup", str(_NICE)), ("oom_score_adj", _FIRST_TO_END)):
        # with autogroups, a session has a share of the cores, and nice counts within it alone (sched(7))
        with contextlib.suppress(OSError):
            Path("/proc/self", file).write_text(value)


def _import(modules: Sequence[object]) -> None:
    before = {name: os.environ.get(name) for name in _ONE_THREAD}
    os.environ.update(_ONE_THREAD)
    for name in modules:
        try:
            import_module(str(name))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a module may raise anything; the worker says so
            let_through(error)
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


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
