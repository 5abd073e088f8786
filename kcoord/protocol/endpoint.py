"""The agent socket as a file: where it is bound, locked, connected to, probed and removed. A probe runs every few seconds."""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from kcoord.errors import ProtocolError, StoreError
from kcoord.files.faults import store_error
from kcoord.files.private import make_private
from kcoord.ownership import is_ours
from kcoord.protocol import frames
from kcoord.protocol.identity import Identity
from kcoord.protocol.own_socket import OwnSocket
from kcoord.settings import Settings

_LOOK_EVERY = 0.1  # seconds between two probes
BACKLOG = 4096  # clients that may wait to be accepted; the kernel may allow fewer


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
        if (uid := frames.peer_of(connection).uid) != os.getuid() or not is_ours(uid):
            connection.close()
            raise PermissionError(errno.EPERM, f"user {uid} listens there", os.fspath(path))
        return connection


def why_silent(settings: Settings, timeout: float) -> str:
    """Empty if the agent greets a client within `timeout` seconds, else the reason. Never starts an agent."""
    try:
        with connect(settings.socket_path, timeout) as connection:
            connection.settimeout(timeout)
            process = Identity.here(replace(settings, job="probe"))
            frames.send_frame(connection, frames.encode_frame(process.hello()))
            reply = frames.receive_frame(connection)
    except (OSError, ProtocolError) as error:
        return f"no agent answers at {settings.socket_path}: {getattr(error, 'strerror', None) or error}"
    if reply.get("op") != "welcome":
        return f"the agent at {settings.socket_path} refuses: {reply.get('why')!r:.200}"
    return ""


def await_agent(settings: Settings, within: float) -> str:
    """`why_silent`, repeated until the agent answers or `within` seconds are over."""
    deadline = time.monotonic() + within
    while why := why_silent(settings, min(within, settings.agent_timeout)):
        if time.monotonic() + _LOOK_EVERY > deadline:
            return why
        time.sleep(_LOOK_EVERY)
    return ""


def make_directory(settings: Settings) -> None:
    """Make the socket's directory, for this user alone. Raises `StoreError`, also if others may write to the local directory."""
    directory = settings.socket_path.parent
    try:
        make_private(settings.local_dir)
    except StoreError as error:
        if directory == settings.local_dir or not error.passing:
            raise StoreError(f"KCOORD_LOCAL_DIR={error}", error.remedy, passing=error.passing) from error
    if settings.socket is not None:
        make_private(directory, "set KCOORD_SOCKET to a name in a directory of your own")
    elif directory != settings.local_dir:
        make_private(directory)


@contextmanager
def agent_lock(path: Path, timeout: float) -> Iterator[None]:
    """The lock under which the socket at `path` is bound or unlinked.

    Raises TimeoutError, or `StoreError` if the directory cannot be written.
    """
    from filelock import FileLock

    lock = FileLock(f"{path}.lock", timeout=timeout, mode=0o600)
    try:
        lock.acquire()
    except TimeoutError:
        raise
    except OSError as error:
        raise store_error(error, path.parent) from error
    try:
        yield
    finally:
        lock.release()


def bind(path: Path) -> socket.socket:
    """A listening socket at `path`, for this user alone; replaces a dead agent's. Call it under `agent_lock`.

    Raises OSError, and `StoreError` if `path` is a file that is no socket.
    """
    if path.is_file():
        raise StoreError(f"KCOORD_SOCKET={path}: it is a file, and no socket: name another one, or remove it")
    path.unlink(missing_ok=True)
    listener = OwnSocket(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    os.fchmod(listener.fileno(), 0o600)  # the name gets this mode; a umask would apply to other threads' files, too
    try:
        listener.bind(os.fspath(path))
    except OSError:
        listener.close()
        raise
    listener.listen(BACKLOG)
    return listener


def bind_unless_served(path: Path, timeout: float) -> socket.socket | None:
    """`bind`, or None if an agent listens at `path`. Call it under `agent_lock`. Raises as that does."""
    try:
        connect(path, timeout).close()
    except (FileNotFoundError, ConnectionRefusedError):
        return bind(path)
    return None


def log_of(path: Path) -> Path:
    """The log of the agent whose socket is `path`, if no launcher started it."""
    return path.with_suffix(".log")


def log_to_file(path: Path) -> None:
    """Write this agent's output to the log beside its socket from now on.

    Whoever reads the launcher's output waits for its end, which must not be the agent's.
    """
    with open_log(log_of(path)) as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)


def open_log(log: Path) -> BinaryIO:
    try:
        return open(log, "ab", opener=lambda name, flags: os.open(name, flags, 0o600))
    except OSError:  # a full disk, most likely: an agent without a log is better than none
        return Path(os.devnull).open("ab")


def identity_of(path: Path) -> tuple[int, int] | None:
    """Identity of the socket file at `path`, unlike any later one's; None: no file. An inode alone is used again at once."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns


def unlink_own(path: Path, identity: tuple[int, int] | None, timeout: float) -> None:
    """Remove the socket's name if it is still the one with `identity`, and the lock and the directory allow it."""
    with suppress(OSError, StoreError), agent_lock(path, timeout):
        if identity is not None and identity_of(path) == identity:
            path.unlink(missing_ok=True)
