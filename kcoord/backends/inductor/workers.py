"""One pool of torch's compile workers for the ranks of a node, instead of one for each rank.

Torch starts a process for its pool, and hands it the ends of two pipes. A rank of several hands them to the node's pool instead
(`kcoord.backends.inductor.worker_pool`), which the first rank starts; torch's client does not change. Ranks share a pool if all
that a compile may depend on is equal: the environment without `PER_RANK`, the interpreter, torch, the working directory, the
cores, the models of GPUs, the job.

If anything goes wrong, the rank has torch's own pool. If the node's pool dies, each rank starts its own, which does the rank's
unanswered jobs again.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.default_dir import runtime_directory
from kcoord.errors import StoreError
from kcoord.files.private import make_private
from kcoord.interruption import let_through
from kcoord.protocol import endpoint
from kcoord.protocol.identity import Identity
from kcoord.ranks import nodes_of, ranks_of
from kcoord.settings import Settings

PER_RANK: tuple[str, ...] = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "TORCHELASTIC_ERROR_FILE", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK", "OMPI_FILE_LOCATION", "PMI_RANK", "PMI_LOCAL_RANK", "PMI_FD",
    "PMIX_RANK", "MPI_LOCALRANKID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_TASK_PID",
)  # fmt: skip
"""Variables in which the ranks of a node differ, and no compile. A worker has those of the rank whose job it does."""

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""As `PER_RANK` where the models of the GPUs are known, which count instead."""

_OF_THIS_RANK = ("--parent=", "--read-fd=", "--write-fd=")  # torch's arguments
_STOCK = {"--pickler=torch._inductor.compile_worker.subproc_pool.SubprocPickler", "--kind=fork"}
_PROGRAM = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); from kcoord.backends.inductor.worker_pool import main; main()"
)
_BESIDE = '[ -x "$1" ] || exit 127; "$@" </dev/null &'
"""So the pool is no child of a rank: see `kcoord.rank.pool_start`."""
_START = 5.0  # seconds for the shell to start it; it takes one or two milliseconds
_FAILURES = (OSError, StoreError, subprocess.SubprocessError)

_lock = threading.RLock()  # while a successor is made
_was_lost = False  # a pool that this process had joined


class Membership:
    """Torch's process of a pool, of which it is a member. `workers`: the number that torch asked for."""

    pid, returncode = 0, None

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.left = False  # this rank has shut its pool down
        self.successor: Any = None

    def poll(self) -> None:
        """Not known: the pipe closes when the pool ends."""

    def wait(self, timeout: float | None = None) -> int:
        return 0

    def kill(self) -> None:
        """It is not this rank's alone."""


class Subprocess:
    """The module `subprocess` as torch's `SubprocPool` sees it."""

    __kcoord_wrapped__ = True

    def __init__(self, native: Any) -> None:
        self._native = native

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def Popen(self, command: list[str], **how: Any) -> Any:
        return _joined(command, how) or self._native.Popen(command, **how)


# Joining the node's pool.


@fails_open(lambda command, how: None)
def _joined(command: list[str], how: Mapping[str, Any]) -> Membership | None:
    """Hand the pipes to the node's pool. None if the rank is to have its own."""
    coordinator = coordinator_in_use()
    several = (ranks_of().world or 1) > nodes_of()
    if coordinator is None or _was_lost or not (several and coordinator.settings.share_workers):
        return None
    arguments = dict(each.partition("=")[::2] for each in command if each.startswith("--"))
    if not _STOCK.issubset(command):
        return None
    member = Membership(int(arguments["--workers"]))
    mine = json.dumps({name: how["env"].get(name) for name in (*PER_RANK, *_VISIBLE)}).encode()
    try:
        with Path(os.devnull).open("r+b") as nothing:
            with _connected(coordinator.settings, command, arguments, how) as connection:
                socket.send_fds(connection, [mine], how["pass_fds"])
            # torch 2.14 closes them; while 2.13's are open, the end of the pool is not seen
            for each in how["pass_fds"]:
                os.dup2(nothing.fileno(), each, inheritable=False)
    except _FAILURES as error:
        let_through(error)
        notices.tell(f"torch's compile workers are this rank's own: {error}", about="compile workers")
        return None
    return member


def _connected(
    settings: Settings, command: Sequence[str], arguments: Mapping[str, str], how: Mapping[str, Any]
) -> socket.socket:
    """A connection to the node's pool, which is started if there is none. Raises `_FAILURES`."""
    directory, within = runtime_directory(), settings.agent_timeout
    path = directory / f"workers-{_shared_by(settings, command, how['env'])}.sock"
    try:
        return endpoint.connect(path, within)
    except (FileNotFoundError, ConnectionRefusedError):
        make_private(directory)
    with lock_of(path, within):
        listener = endpoint.bind_unless_served(path, within)
        if listener is not None:
            with listener:
                given = [str(listener.fileno()), arguments["--workers"], arguments["--torch-key"], str(path)]
                _start([command[0], "-c", _PROGRAM, *given], listener.fileno(), how)
        return endpoint.connect(path, within)


def lock_of(path: Path, timeout: float) -> Any:
    """The lock under which the socket of a pool is bound or unlinked: one for all pools, so that no job leaves one behind."""
    return endpoint.agent_lock(path.with_name("workers"), timeout)


def _shared_by(settings: Settings, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """A name that ranks have in common if they may share a pool."""
    gpus, differ = None, PER_RANK
    if torch.cuda.is_initialized():
        gpus = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
        differ = PER_RANK + _VISIBLE
    factors = (
        Identity.here(settings).job,
        [each for each in command if not each.startswith(_OF_THIS_RANK)],
        sorted((name, value) for name, value in environ.items() if name not in differ),
        gpus,
        os.getcwd(),  # noqa: PTH109 - an error is one line
        sorted(os.sched_getaffinity(0)),
        [os.stat(f"/proc/self/ns/{each}").st_ino for each in ("mnt", "pid")],  # noqa: PTH116
    )
    return hashlib.sha256(repr(factors).encode("utf-8", "surrogateescape")).hexdigest()[:16]


def _start(program: list[str], listener: int, how: Mapping[str, Any]) -> None:
    """Start the pool in a session of its own: a signal for a rank's process group does not reach it."""
    shell = subprocess.Popen(
        ["/bin/sh", "-c", _BESIDE, "sh", *program],
        env={name: value for name, value in how["env"].items() if name not in PER_RANK},
        stdin=subprocess.DEVNULL,
        stdout=how.get("stdout"),
        stderr=how.get("stderr"),
        pass_fds=[listener],
        start_new_session=True,
    )
    try:
        if shell.wait(_START):
            raise OSError(f"{program[0]} cannot be started")
    except subprocess.TimeoutExpired:
        shell.kill()
        raise


# Torch's methods of a pool, which has lost its process if that was the node's and has died.


def submit(native: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``SubprocPool.submit``: the future of a job that does not fail for the end of the node's pool."""
    member = pool.process
    if not isinstance(member, Membership):
        return native(pool, *args, **kwargs)
    if member.successor is not None:
        return member.successor.submit(*args, **kwargs)
    try:
        asked = native(pool, *args, **kwargs)
    except (RuntimeError, OSError) as error:  # closed, or a broken pipe
        let_through(error)
        if member.left:
            raise
        return _successor(pool).submit(*args, **kwargs)
    answer: Future[Any] = Future()
    answer.set_running_or_notify_cancel()
    asked.add_done_callback(partial(_answer, answer, pool, lambda: _successor(pool).submit(*args, **kwargs)))
    return answer


def wakeup(native: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> Any:
    member = pool.process
    if isinstance(member, Membership) and not (pool.running or member.left):
        return _successor(pool).wakeup(*args, **kwargs)
    return native(pool, *args, **kwargs)


def quiesce(native: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``SubprocPool.quiesce``, which raises if the process has ended."""
    return native(pool, *args, **kwargs) if pool.running or not isinstance(pool.process, Membership) else None


def shutdown(native: Callable[..., Any], pool: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``SubprocPool.shutdown``, which torch calls also once the process has ended; then the pool is not `running`."""
    if isinstance(pool.process, Membership) and pool.running:
        pool.process.left = True
    return native(pool, *args, **kwargs)


def _answer(answer: Future[Any], pool: Any, again: Callable[[], Future[Any]], asked: Future[Any]) -> None:
    error = asked.exception()
    if type(error) is RuntimeError and not pool.process.left:  # torch's, when its process has ended
        try:
            again().add_done_callback(partial(_copy, answer))
        except (RuntimeError, OSError) as another:  # the interpreter ends, or there are no more processes
            let_through(another)
        else:
            return
    _copy(answer, asked)


def _copy(answer: Future[Any], asked: Future[Any]) -> None:
    if (error := asked.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(asked.result())


def _successor(pool: Any) -> Any:
    """This rank's own pool, in place of one whose process was the node's and has ended."""
    from torch._inductor.async_compile import _pool_set

    global _was_lost
    with _lock:
        member = pool.process
        if member.successor is None:
            _was_lost = True
            notices.tell("the node's compile workers have ended: this rank starts its own", about="compile workers")
            quiesces = pool.timer is not None
            member.successor = type(pool)(member.workers, pool.pickler, pool.kind, quiesces)
            _pool_set.add(member.successor)
        return member.successor
