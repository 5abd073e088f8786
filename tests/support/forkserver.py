"""Python processes that begin with modules imported: a server imports them once, and forks.

For suites whose programs import a compiler that takes seconds. The processes are as real as others: each has a process id, a
command line, an environment and a death of its own, in the network and the mounts of the process that asks for it. They differ
from others in two points. A variable that a preloaded module reads while it is imported, and one of the interpreter's own
(``PYTHONHASHSEED``), has the server's value. At the end functions of `atexit` are called, and no destructors.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import ModuleType
from typing import IO

_LARGEST_REQUEST = 1 << 20  # bytes
_MOST_DESCRIPTORS = 18  # of a request
_ENDS_WITHIN = 10.0  # seconds
_PR_SET_PDEATHSIG = 1
_ARGUMENTS, _VARIABLES = 48, 50  # in /proc/PID/stat: where each begins, and in the next field where it ends
_ROOM = 16 << 10  # bytes of each that a process may have more than the server
_INTERPRETER = ("PYTHONHASHSEED", "LD_PRELOAD")  # the variables that only a new interpreter obeys


class ForkClient:
    """Asks the server at `address`, which has the variables `environ`, for processes."""

    def __init__(self, address: str, environ: Mapping[str, str]) -> None:
        self.address, self._environ = address, dict(environ)

    def serves(self, environ: Mapping[str, str]) -> bool:
        """False: a process with these variables needs an interpreter of its own."""
        return all(environ.get(name) == self._environ.get(name) for name in _INTERPRETER)

    def start(
        self,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        cwd: Path | str,
        streams: Sequence[int] = (),
        pass_fds: Sequence[int] = (),
        start_new_session: bool = False,
    ) -> Forked:
        """``python *arguments``: a program's path, or ``-c`` or ``-m`` and its operand, and what follows.

        `streams`: descriptors of its input, output and errors. Without them it has no input, and `Forked.communicate` returns the
        rest. `pass_fds`: descriptors that it has under the same numbers.
        Raises RuntimeError or OSError if the server has ended: a module cannot be imported.
        """
        request = json.dumps([list(arguments), dict(environ), str(cwd), list(pass_fds), start_new_session]).encode()
        with ExitStack() as opened:
            outputs = [] if streams else [opened.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
            null = opened.enter_context(Path(os.devnull).open("rb"))
            status, theirs = os.pipe()
            opened.callback(os.close, status)
            streams = streams or [each.fileno() for each in (null, *outputs)]
            with ExitStack() as lent:
                lent.callback(os.close, theirs)
                spaces = [lent.enter_context(Path("/proc/self/ns", name).open("rb")) for name in ("net", "mnt")]
                self._send(request, [theirs, *(each.fileno() for each in spaces), *streams, *pass_fds])
            forked = Forked(["python", *arguments], status, outputs)
            opened.pop_all()  # they are `forked`'s
            null.close()
            return forked

    def _send(self, request: bytes, descriptors: Sequence[int]) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
            asking.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LARGEST_REQUEST)
            asking.connect(self.address)
            socket.send_fds(asking, [request], descriptors)


class ForkServer(ForkClient):
    """One server with `modules` imported under the variables `environ`. `close` ends it, and what it has started.

    Processes that know its `address` may ask it, too, by a `ForkClient`.
    """

    def __init__(self, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        self._directory = tempfile.mkdtemp(prefix="kcoord-fork-", dir="/tmp")  # a socket's path is short
        address = Path(self._directory, "requests")
        self._life, life = socket.socketpair()
        with life, listen(address) as requests:
            self._server = start_server(modules, environ, requests, life.fileno())
        super().__init__(str(address), environ)

    def close(self) -> None:
        """Another process may have inherited the socket: so it is shut down, too."""
        with suppress(OSError):  # the server has ended
            self._life.shutdown(socket.SHUT_RDWR)
        self._life.close()
        try:
            self._server.wait(_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()
        shutil.rmtree(self._directory, ignore_errors=True)


def listen(address: Path) -> socket.socket:
    requests = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    requests.bind(str(address))
    return requests


def start_server(
    modules: Sequence[str], environ: Mapping[str, str], requests: socket.socket, life: int
) -> subprocess.Popen[bytes]:
    """`life`: a descriptor that can be read as soon as the server is to end."""
    room = "-" * _ROOM
    numbers = [requests.fileno(), life]
    command = [sys.executable, "-m", __name__, *map(str, numbers), *modules, room]
    none = subprocess.DEVNULL
    return subprocess.Popen(command, env={**environ, "_": room}, pass_fds=numbers, stdin=none, stdout=none)


class Forked:
    """A process that a `ForkServer` started, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, args: list[str], status: int, outputs: Sequence[IO[bytes]]) -> None:
        self.args, self.returncode = args, None  # type: list[str], int | None
        self._status, self._outputs = status, outputs
        self._waits = threading.Lock()
        self._lines = b""
        while b"\n" not in self._lines:  # the server may still import
            if not (more := os.read(status, 64)):
                raise RuntimeError("the fork server has ended: its modules cannot be imported")
            self._lines += more
        pid, _, self._lines = self._lines.partition(b"\n")
        self.pid = int(pid)

    def __del__(self) -> None:
        for output in self._outputs:  # of one whose words nobody wanted
            output.close()

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; negative: the signal that ended it. Raises `subprocess.TimeoutExpired`."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._waits.acquire(timeout=-1 if timeout is None else timeout):  # another thread waits, too
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        try:
            while self.returncode is None:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not select.select([self._status], [], [], left)[0]:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                more = os.read(self._status, 64)
                self._lines += more
                if not more:
                    os.close(self._status)
                    self.returncode = int(self._lines or b"-9")  # without a word: the server was killed, and it with it
        finally:
            self._waits.release()
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Its output and its errors, once it has ended, if it has no `streams`. Raises `subprocess.TimeoutExpired`."""
        self.wait(timeout)
        texts = []
        for output in self._outputs:
            output.seek(0)
            texts.append(output.read().decode(errors="replace"))
            output.close()
        return texts[0], texts[1]

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _serve(requests: socket.socket, life: int) -> list[str]:
    """Fork a process for each request until `life` ends. Returns in the child alone, with its arguments.

    Invariant: `statuses` has the processes that were started and have not been waited for.
    """
    statuses: dict[int, int] = {}
    ended, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    own = os.getpid()
    while True:
        ready, _, _ = select.select([requests.fileno(), life, ended], [], [])
        if life in ready:
            break
        if ended in ready:
            os.read(ended, 512)
            _wait_for_ended(statuses)
        if requests.fileno() in ready:
            request, received, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, _MOST_DESCRIPTORS)
            status, *given = received
            pid = os.fork()
            if not pid:
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                if os.getppid() != own:
                    os._exit(1)
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                for each in (ended, wakes, life, *statuses.values()):
                    os.close(each)
                requests.close()
                return _become(request, received)
            statuses[pid] = status
            for each in given:
                os.close(each)
    for pid in statuses:
        os.kill(pid, signal.SIGKILL)
    os._exit(0)


def _wait_for_ended(statuses: dict[int, int]) -> None:
    """Tell the exit codes of the processes that have ended."""
    for each in list(statuses):  # not others, which a module may have started
        pid, status = os.waitpid(each, os.WNOHANG)
        if pid:
            _tell(statuses[pid], b"%d" % os.waitstatus_to_exitcode(status))
            os.close(statuses.pop(pid))


def _tell(status: int, word: bytes) -> None:
    with suppress(BrokenPipeError):  # nobody waits for this process any more
        os.write(status, word)


def _become(request: bytes, received: list[int]) -> list[str]:
    """Give this child its descriptors, variables and directory, and tell its process id; returns its arguments."""
    arguments, environ, cwd, numbers, starts_session = json.loads(request)
    if starts_session:
        os.setsid()
    wanted = [0, 1, 2, *numbers]
    above = max(*wanted, *received) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in received]  # none overwrites another
    status, network, mounts, *given = moved
    _enter("net", network)
    _enter("mnt", mounts)
    for each in received:
        os.close(each)
    for each, number in zip(given, wanted, strict=True):
        os.dup2(each, number)
        os.close(each)
    before, now = (each.get("PYTHONPATH", "").split(os.pathsep) for each in (os.environ, environ))
    sys.path[1:] = dict.fromkeys([*filter(None, now), *(each for each in sys.path[1:] if each not in before)])
    os.environ.clear()
    os.environ.update(environ)
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    _show(_VARIABLES, [f"{name}={value}" for name, value in environ.items()])
    _show(_ARGUMENTS, [sys.executable, *arguments])
    os.chdir(cwd)
    tempfile.tempdir = None  # it is a variable's, TMPDIR
    _tell(status, b"%d\n" % os.getpid())
    os.close(status)
    listed: list[str] = arguments
    return listed


def _enter(name: str, descriptor: int) -> None:
    """Make the namespace of `descriptor` this process's, and close it."""
    if os.fstat(descriptor).st_ino != Path("/proc/self/ns", name).stat().st_ino:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(descriptor, 0):
            raise OSError(number := ctypes.get_errno(), f"{os.strerror(number)}: the {name} namespace")
    os.close(descriptor)


def _show(field: int, words: list[str]) -> None:
    """Overwrite the memory that ``/proc/PID/cmdline`` or ``/proc/PID/environ`` shows. What is in use is elsewhere."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = (int(fields[each - 3]) for each in (field, field + 1))
    shown = b"".join(os.fsencode(word) + b"\0" for word in words)[: end - begin]
    ctypes.memmove(begin, shown.ljust(end - begin, b"\0"), end - begin)


def _run(arguments: list[str]) -> None:
    """Run the program of `arguments` as the interpreter does, in a new ``__main__``."""
    first, *rest = arguments
    sys.orig_argv[:] = [sys.executable, *arguments]
    if first == "-m":
        sys.argv, sys.path[0] = rest, str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    module = sys.modules["__main__"] = ModuleType("__main__")
    if first == "-c":
        sys.argv, sys.path[0] = [first, *rest[1:]], ""
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv, sys.path[0] = arguments, str(Path(first).resolve().parent)
        module.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, vars(module))


def _exit_code(arguments: list[str]) -> int:
    """Run the program, and return its exit code; negative: the signal that is to end it."""
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - what the interpreter itself does with it
        sys.excepthook(*sys.exc_info())
        return -signal.SIGINT if isinstance(sys.exc_info()[1], KeyboardInterrupt) else 1
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the processes
    for _name in sys.argv[3:-1]:
        __import__(_name)
    gc.collect()
    gc.freeze()  # a collection in a child would copy the pages of all modules
    _code = _exit_code(_serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])))
    vars(threading)["_shutdown"]()  # it waits for the threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    if _code < 0:
        signal.signal(-_code, signal.SIG_DFL)
        os.kill(os.getpid(), -_code)
    os._exit(_code)  # to take apart what the server imported costs a second
