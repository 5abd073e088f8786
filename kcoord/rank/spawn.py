"""Finds this node's agent, or starts it: ten processes that start at once get one agent.

A starter binds and listens *before* the agent's process exists, and hands it the socket: clients may connect at once, and wait in
the backlog. It decides under a file lock beside the socket.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kcoord.errors import AgentUnavailable, StoreError
from kcoord.packs.automatic import is_automatic
from kcoord.protocol.endpoint import agent_lock, bind_unless_served, connect, log_of, make_directory, open_log
from kcoord.ranks import POOL_SCRIPT
from kcoord.settings import FIELDS, NO_PROFILE, Settings, variable

_LONGEST_START = 30.0  # seconds of a process that starts an agent, on a slow disk, beside the wait for it


def find_or_start(settings: Settings, *, start: bool = True) -> socket.socket:
    """A connection to this node's agent. Starts one if there is none, unless `start` or a setting forbids it.

    Raises `AgentUnavailable`.
    """
    path = settings.socket_path
    try:
        return connect(path, settings.agent_timeout)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError) as error:
        if not (settings.spawn and start):
            raise AgentUnavailable(
                f"nobody listens at {path}: {error.strerror}: the agent has ended, or its directory was removed; its launcher, "
                "sidecar or service is to start it again, and ranks start none (KCOORD_SPAWN=0)"
            ) from error
    except OSError as error:
        raise AgentUnavailable(f"the agent at {path} does not answer: {error}") from error
    try:
        make_directory(settings)
        with agent_lock(path, settings.agent_timeout):
            listener = bind_unless_served(path, settings.agent_timeout)  # another process may have started it meanwhile
            if listener is not None:
                with listener:
                    start_daemon(listener, settings)
        try:
            return connect(path, settings.agent_timeout)
        except ConnectionRefusedError as error:
            raise AgentUnavailable(f"the agent ended as soon as it had started; see {log_of(path)}") from error
    except (OSError, StoreError, subprocess.SubprocessError) as error:
        raise AgentUnavailable(f"no agent could be started at {path}: {error}") from error


def start_daemon(listener: socket.socket, settings: Settings) -> None:
    """Start a detached agent on `listener`. Its log is a file beside the socket, or nothing if that cannot be written.

    Raises `AgentUnavailable`, also if it has not started within ``settings.agent_timeout``: it may still serve later
    claims.
    """
    log = log_of(settings.socket_path)
    # it may outlive this job, whose name is not the next one's
    shared = replace(settings, profile=NO_PROFILE) if is_automatic(settings.profile) else settings
    with open_log(log) as output:
        starter = start_process(listener, ["--daemon"], shared, output.fileno())
    try:
        code = starter.wait(timeout=settings.agent_timeout)
    except subprocess.TimeoutExpired as error:
        with suppress(RuntimeError):  # no more threads: then it may be a zombie
            threading.Thread(target=_end_late, args=(starter,), name="kcoord-agent-starts", daemon=True).start()
        raise AgentUnavailable(f"the agent has not started within {settings.agent_timeout:g} s: see {log}") from error
    if code != 0:
        raise AgentUnavailable(f"the agent did not start: see {log}")


def _end_late(starter: subprocess.Popen[bytes]) -> None:
    """Kill `starter` if it has not ended within `_LONGEST_START` seconds, and wait for its end."""
    try:
        starter.wait(timeout=_LONGEST_START)
    except subprocess.TimeoutExpired:
        starter.kill()
        starter.wait()


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
    """The path of this process's Python. Raises `AgentUnavailable`."""
    if getattr(sys, "frozen", False):  # its executable is the program itself, and would run it once more
        raise AgentUnavailable("this program is frozen: start 'kcoord agent' beside it")
    if not sys.executable:
        raise AgentUnavailable("this Python does not know its own executable")
    return sys.executable


def agent_environment(settings: Settings) -> dict[str, str]:
    """This environment with `settings`, and without a rank's variables."""
    replaced = {"RANK", "LOCAL_RANK", POOL_SCRIPT, *(variable(field.name) for field in FIELDS)}
    environment = {name: value for name, value in os.environ.items() if name not in replaced}
    package_root = str(Path(__file__).absolute().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), package_root]))
    environment |= settings.to_environ(without=("job",))
    for name in settings.optional:
        if getattr(settings, name) is None:  # a mounted Secret lacks it: the agent says so
            environment[variable(name)] = os.environ.get(variable(name), "")
    return environment
