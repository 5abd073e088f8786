"""Finding this node's agent, or starting it: ten processes that start at once get one agent.

Whoever starts an agent binds and listens *before* the agent's process exists, and hands it the socket: clients may connect
at once, their connections wait in the backlog. The decision is taken under a file lock beside the socket.
"""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kcoord.agent.peer import peer_of
from kcoord.artifacts.local import make_private
from kcoord.errors import AgentUnavailable, StoreError
from kcoord.own_socket import OwnSocket
from kcoord.settings import FIELDS, Settings, variable

BACKLOG = 4096  # clients that may wait to be let in; the kernel may allow fewer


def connect(path: Path, timeout: float) -> socket.socket:
    """A connection to the agent at `path`.

    Raises OSError (nobody listens), TimeoutError (backlog full) or PermissionError (another user listens there).
    """
    deadline = time.monotonic() + timeout
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(os.fspath(path))
        except OSError as error:
            connection.close()
            if error.errno != errno.EAGAIN or time.monotonic() > deadline:
                raise
            time.sleep(0.01)  # the backlog is full: the agent is alive and busy
            continue
        if (uid := peer_of(connection).uid) != os.getuid():
            connection.close()
            raise PermissionError(errno.EPERM, f"user {uid} listens there", os.fspath(path))
        return connection


def find_or_start(settings: Settings, *, start: bool = True) -> socket.socket:
    """A connection to this node's agent; if there is none it is started, unless `start` or a setting forbids it.

    Raises `AgentUnavailable`.
    """
    path = settings.socket_path
    try:
        return connect(path, settings.agent_timeout)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        if not (settings.spawn and start):
            raise AgentUnavailable(f"no agent listens at {path}, and KCOORD_SPAWN=0: {error}") from error
    except OSError as error:
        raise AgentUnavailable(f"the agent at {path} does not answer: {error}") from error
    try:
        make_directory(settings)
        with agent_lock(path, settings.agent_timeout):
            try:
                return connect(path, settings.agent_timeout)  # another process was faster
            except (FileNotFoundError, ConnectionRefusedError):
                listener = bind(path)
            with listener:
                start_daemon(listener, settings)
        try:
            return connect(path, settings.agent_timeout)
        except ConnectionRefusedError as error:
            raise AgentUnavailable(f"the agent ended as soon as it had started; see {log_of(path)}") from error
    except (OSError, StoreError, subprocess.SubprocessError) as error:
        raise AgentUnavailable(f"no agent could be started at {path}: {error}") from error


def make_directory(settings: Settings) -> None:
    """Where the socket is to be, for this user alone. Raises `StoreError`."""
    directory = settings.socket_path.parent
    if settings.socket is None:
        make_private(directory)
    else:
        make_private(directory, "set KCOORD_SOCKET to a name in a directory of your own")


@contextmanager
def agent_lock(path: Path, timeout: float) -> Iterator[None]:
    """Held by whoever binds or unlinks the socket at `path`. Raises TimeoutError (an OSError)."""
    from filelock import FileLock

    with FileLock(f"{path}.lock", timeout=timeout):
        yield


def bind(path: Path) -> socket.socket:
    """A listening socket at `path`, for this user alone; a dead agent's is replaced. Call it under `agent_lock`.

    Raises OSError, also if a file is there that is no socket.
    """
    if path.is_file():
        raise FileExistsError(errno.EEXIST, "it is no socket", os.fspath(path))
    path.unlink(missing_ok=True)
    listener = OwnSocket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    os.fchmod(listener.fileno(), 0o600)  # the name gets this mode; a umask would hit the other threads' files, too
    try:
        listener.bind(os.fspath(path))
    except OSError:
        listener.close()
        raise
    listener.listen(BACKLOG)
    return listener


def start_daemon(listener: socket.socket, settings: Settings) -> None:
    """Start a detached agent on `listener`. It logs to a file beside the socket, or nowhere if that cannot be written.

    One that is killed as it starts is started once more. Raises `AgentUnavailable`.
    """
    log = log_of(settings.socket_path)
    with _append_to(log) as output:
        for _ in range(2):
            starter = start_process(listener, ["--daemon"], settings, output.fileno())
            try:
                code = starter.wait(timeout=30)
            except subprocess.TimeoutExpired:
                starter.kill()
                starter.wait()
                break
            if code == 0:
                return
            if code > 0:  # it says in its log why
                break
    raise AgentUnavailable(f"the agent did not start: see {log}")


def log_of(path: Path) -> Path:
    """Where the agent logs whose socket is `path`, if no launcher has started it."""
    return path.with_suffix(".log")


def log_to_file(path: Path) -> None:
    """From now on this agent's output goes beside its socket: whoever reads its launcher's must not wait for its end."""
    with _append_to(log_of(path)) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)


def _append_to(log: Path) -> BinaryIO:
    try:
        return log.open("ab")
    except OSError:  # a full disk, most likely: an agent without a log is better than none
        return Path(os.devnull).open("ab")


def start_process(
    listener: socket.socket, arguments: list[str], settings: Settings, output: int | None = None
) -> subprocess.Popen[bytes]:
    """Start an agent's process on `listener`, in a session of its own. Raises OSError and `AgentUnavailable`."""
    fd = listener.fileno()
    return subprocess.Popen(
        [interpreter(), "-m", "kcoord.agent", "--fd", str(fd), *arguments],
        pass_fds=[fd],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        cwd="/",
        env=agent_environment(settings),
        start_new_session=True,
    )


def interpreter() -> str:
    """What runs Python modules, as this process does. Raises `AgentUnavailable`."""
    if getattr(sys, "frozen", False):  # its executable is the program itself, which would run once more
        raise AgentUnavailable("this program is frozen: start 'kcoord agent' beside it")
    if not sys.executable:
        raise AgentUnavailable("this Python does not know its own executable")
    return sys.executable


def agent_environment(settings: Settings) -> dict[str, str]:
    """This environment with every setting spelled out, and without what makes a process a rank."""
    package_root = str(Path(__file__).absolute().parents[2])
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "TRITON_CACHE_MANAGER")}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package_root]))
    for spec in FIELDS:
        value = getattr(settings, spec.name)
        environment.pop(variable(spec.name), None)
        if value is not None and spec.name != "job":
            environment[variable(spec.name)] = str(int(value)) if isinstance(value, bool) else str(value)
    for name in settings.optional:
        if getattr(settings, name) is None:  # a mounted Secret lacks it: the agent says so
            environment[variable(name)] = os.environ.get(variable(name), "")
    return environment


def identity_of(path: Path) -> tuple[int, int] | None:
    """Tells a socket's name from a later one at the same path; an inode alone is used again at once. None: no name."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def unlink_own(path: Path, identity: tuple[int, int] | None) -> None:
    """Remove the socket's name if it is still the one with `identity`. Call it under `agent_lock`."""
    if identity is not None and identity_of(path) == identity:
        path.unlink(missing_ok=True)
