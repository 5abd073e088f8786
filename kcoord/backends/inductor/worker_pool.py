"""The program of a node's pool of compile workers: torch's own, for the pipes of several ranks.

Torch's `SubprocMain` serves each rank's pipes, in a thread. All jobs run in one executor, whose workers end with this process. It
ends when it has had no rank for `_LINGERS` seconds.
"""

from __future__ import annotations

import base64
import ctypes
import functools
import json
import multiprocessing
import os
import queue
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from torch._inductor.async_compile import pre_fork_setup
from torch._inductor.codecache import torch_key
from torch._inductor.compile_worker import __main__ as _prepared  # noqa: F401 - it prepares Triton as it is imported
from torch._inductor.compile_worker import subproc_pool
from torch._inductor.compile_worker.utils import _async_compile_initializer

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.backends.inductor.workers import lock_of
from kcoord.cgroups import free_memory
from kcoord.errors import StoreError
from kcoord.protocol import endpoint, frames

_LINGERS = 2.0  # seconds
_HANDSHAKE = 5.0  # seconds
_WORKER = 256 << 20  # bytes that one needs
_PR_SET_PDEATHSIG = 1


class _Job(Future[bytes]):
    """`run` of a rank, whose thread `answers` sends the result: the rank may not read. `content` is equal for equal jobs.

    `is_suspect`: it ran when a worker died. It is done again by a worker of its own, so a job that kills workers fails alone.
    """

    def __init__(self, run: Callable[[], bytes], answers: ThreadPoolExecutor, content: object) -> None:
        super().__init__()
        self.run, self.answers, self.content = run, answers, content
        self.is_suspect = False


class _Share:
    """The executor of a rank, as torch sees it."""

    def __init__(self, workers: Workers, environ: Mapping[str, str | None]) -> None:
        self._workers, self._environ = workers, environ
        self._answers = ThreadPoolExecutor(1)
        workers.do(functools.partial(workers.wake, self))

    def submit(self, run: functools.partial[bytes]) -> Future[bytes]:
        job = _Job(functools.partial(as_rank, self._environ, run), self._answers, run.args[-1])
        self._workers.do(functools.partial(self._workers.begin, job))
        return job

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._workers.do(functools.partial(self._workers.rest, self))


class _Rank(subproc_pool.SubprocMain):  # type: ignore[misc]
    """Serves the pipes of a rank."""

    pool: Any  # None, or its share

    def __init__(self, workers: Workers, environ: Mapping[str, str | None], reads: int, writes: int) -> None:
        # not FORK, with which torch 2.14 tells the jobs of workers apart by their numbers: ranks have the same ones
        kind, pipes = subproc_pool.SubprocKind.SPAWN, (os.fdopen(reads, "rb"), os.fdopen(writes, "wb"))
        super().__init__(subproc_pool.SubprocPickler(), kind, workers.most, *pipes)
        self._workers, self._environ = workers, environ

    def _start_pool(self) -> None:
        if self.pool is None:
            self.pool = _Share(self._workers, self._environ)


class Workers:
    """The executor, and the ranks that it serves. Only the main thread forks: workers end with the thread that forked them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._executor: Any = None
        self._count = 0  # its workers
        self._waiting: list[_Job] = []
        self._running: set[_Job] = set()
        self._ranks: set[_Rank] = set()
        self._awake: set[_Share] = set()

    def do(self, task: Callable[[], object]) -> None:
        """Have the main thread call ``task()``."""
        self._tasks.put(task)

    def serve(self) -> None:
        """Until there are no ranks."""
        while True:
            try:
                task = self._tasks.get(timeout=_LINGERS)
            except queue.Empty:
                if not self._ranks:
                    return
            else:
                task()

    def wake(self, share: _Share) -> None:
        self._awake.add(share)
        self._started()

    def rest(self, share: _Share) -> None:
        """Let the workers end once no rank needs them."""
        self._awake.discard(share)
        if not self._awake and self._executor is not None:
            self._executor.shutdown(wait=False)
            self._executor = None

    def begin(self, job: _Job) -> None:
        self._waiting.append(job)
        self._fill()

    def _fill(self) -> None:
        """Give the executor at most as many jobs as it has workers, so it has begun all that fail if one dies.

        Of equal jobs, as ranks in step have them, one runs at a time: the others would wait for its compile, and then load it.
        """
        while self._waiting and len(self._running) < self._started():
            contents = {each.content for each in self._running}
            job = next((each for each in self._waiting if each.content not in contents), None)
            if job is None:
                return
            try:
                self._run(job, self._executor)
            except BrokenProcessPool:  # an idle worker has died
                self._executor = None
            else:
                self._waiting.remove(job)

    def _run(self, job: _Job, executor: Any) -> None:
        executor.submit(job.run).add_done_callback(
            lambda done: self.do(functools.partial(self._ended, job, executor, done))
        )
        self._running.add(job)

    def _ended(self, job: _Job, executor: Any, done: Future[bytes]) -> None:
        self._running.discard(job)
        if not isinstance(done.exception(), BrokenProcessPool) or job.is_suspect:
            job.answers.submit(_settle, job, done)
        else:
            self._executor = None if executor is self._executor else self._executor
            job.is_suspect, alone = True, _executor_of(1)
            self._run(job, alone)
            alone.shutdown(wait=False)
        self._fill()

    def _started(self) -> int:
        """The number of workers, which are started if there are none."""
        if self._executor is None:
            self._count = max(1, min(self.most, free_memory() // _WORKER))
            self._executor = _executor_of(self._count)
        return self._count

    def accept(self, listener: socket.socket) -> None:
        """Serve all ranks that connect."""
        while True:
            connection, _ = listener.accept()
            with connection, suppress(OSError):  # it hangs, or it was a probe
                self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        peer = frames.peer_of(connection)
        if peer.uid != os.getuid():
            return
        connection.settimeout(_HANDSHAKE)
        content, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 2)
        if len(descriptors) != 2:
            return
        for each in descriptors:
            os.set_inheritable(each, False)
        rank = _Rank(self, json.loads(content), *descriptors)
        self.do(functools.partial(self._ranks.add, rank))
        _in_thread(self._serve, rank)
        with suppress(OSError):  # no such process, or an old kernel: the pipe's end tells
            _in_thread(self._watch, rank, os.pidfd_open(peer.pid))

    def _serve(self, rank: _Rank) -> None:
        try:
            rank.main()
        finally:
            self.do(functools.partial(self._leave, rank))

    def _watch(self, rank: _Rank, process: int) -> None:
        """A child of the rank may keep its end of a pipe open."""
        poll = select.poll()
        poll.register(process, select.POLLIN)
        poll.poll()
        os.close(process)
        self.do(functools.partial(self._leave, rank))

    def _leave(self, rank: _Rank) -> None:
        self._ranks.discard(rank)
        if rank.pool is not None:
            self.rest(rank.pool)


def _in_thread(work: Callable[..., object], *args: Any) -> None:
    threading.Thread(target=work, args=args, daemon=True).start()


def _executor_of(count: int) -> Any:
    fork, begin = multiprocessing.get_context("fork"), functools.partial(_be_worker, os.getpid())
    made = subproc_pool.TrackedProcessPoolExecutor(count, fork, begin)
    subproc_pool._warm_process_pool(made, count)
    return made


def _settle(job: _Job, done: Future[bytes]) -> None:
    if (error := done.exception()) is not None:
        job.set_exception(error)
    else:
        job.set_result(done.result())


def _be_worker(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    _async_compile_initializer(parent)


_base: dict[str, str] = {}
"""The variables of a worker before its first job; `_rank` has those of the rank whose job it did last."""
_rank: Mapping[str, str | None] | None = None


def as_rank(environ: Mapping[str, str | None], run: Callable[[], bytes]) -> bytes:
    """``run()`` with the variables `environ` of a rank, as whose compile it is counted, and none that another rank's job set."""
    global _rank
    if environ != _rank:
        if _rank is None:
            _base.update(os.environ)
        else:
            _end_as_rank()
        mine = {name: value for name, value in environ.items() if value is not None}
        os.environ.clear()
        os.environ.update({name: value for name, value in _base.items() if name not in environ} | mine)
        with suppress(ImportError, AttributeError):  # torch sets it for a rank's job, beside the variable
            del import_module("triton.knobs").nvidia.libdevice_path
        _rank = environ
    return run()


@fails_open(lambda: None)
def _end_as_rank() -> None:
    """Deliver what belongs to the last rank; the agent learns the next one as it is asked anew."""
    coordinator = coordinator_in_use()
    if coordinator is not None:
        coordinator.close()


def _or_end(work: Callable[..., object], *args: Any) -> None:
    """End this process, however ``work(*args)`` ends: its ranks then have pools of their own."""
    try:
        work(*args)
    finally:
        os._exit(1)


def main() -> None:
    """Run the pool: its arguments are its socket's descriptor, the number of workers, torch's key, and the socket's path."""
    descriptor, most, key, name = sys.argv[1:]
    listener, path = socket.socket(fileno=int(descriptor)), Path(name)
    for number in (signal.SIGUSR1, signal.SIGUSR2):  # the script's; Slurm sends them to every process of a step
        signal.signal(number, signal.SIG_IGN)
    pre_fork_setup()
    torch_key.set(base64.b64decode(key))
    _async_compile_initializer(os.getppid())
    workers, identity = Workers(int(most)), endpoint.identity_of(path)
    _in_thread(_or_end, workers.accept, listener)
    _or_end(_serve, workers, path, identity)


def _serve(workers: Workers, path: Path, identity: tuple[int, int] | None) -> None:
    workers.serve()
    with suppress(OSError, StoreError), lock_of(path, _HANDSHAKE):
        if endpoint.identity_of(path) == identity:
            path.unlink(missing_ok=True)
