"""The agent of a launched job: found or started, started again if it dies, asked for a summary, stopped.

A launcher that finds another one's agent on the node attends it: the agent ends with the last of them, which prints the summary.

The launcher owns the listening socket. An agent that dies is replaced on the same socket, so ranks that connect meanwhile
wait in its backlog for as long as the new one takes to start.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, TypeVar

from kcoord.artifacts.signing import Trust
from kcoord.artifacts.store import Store
from kcoord.backends.registry import child_environ
from kcoord.errors import KcoordError, SettingsError, StoreError
from kcoord.files.private import (
    make_private,
)
from kcoord.protocol import endpoint
from kcoord.rank import spawn
from kcoord.rank.client import AgentClient
from kcoord.rank.liveness import await_agent
from kcoord.settings import FIELDS, LONGEST_JOB, SECRET_FILES, SECRETS, Settings, variable
from kcoord.telemetry.counters import summary
from kcoord.telemetry.events import Notices
from kcoord.telemetry.spans import plain_text
from kcoord_launch.attendance import Attendance, hand_over

T = TypeVar("T")
_PATIENCE = 20.0  # seconds that a file system has to answer before the job starts
_STOP_TIMEOUT = 20.0
_MOST_RESTARTS = 20  # of agents that do not last
_LASTS = 60.0  # seconds after which an agent's end says nothing about the next one's


def say(line: str) -> None:
    """One line on stderr, if anybody still reads it: a closed pipe is no reason for a job to fail."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"kcoord: {line}", file=sys.stderr, flush=True)


def checked_settings(flags: dict[str, str | None], flag_prefix: str = "--") -> Settings:
    """The settings, with directories that can be written. Raises `SettingsError`: one line, with the remedy."""
    settings = Settings.from_environ(None, flag_prefix, **flags)
    if settings.disable:
        return settings
    files = " and ".join(variable(name) for name in SECRET_FILES if getattr(settings, name) is not None)
    settings = _bounded(lambda: _checked_secrets(settings), files, settings)
    check_directories(settings)
    return settings


def _checked_secrets(settings: Settings) -> Settings:
    """Without what a mounted Secret lacks. Raises `SettingsError` if there is something that cannot be used."""
    mounted = settings.as_mounted()
    if mounted.spawn:  # else the agent, with its keys, is somebody else's
        Trust.of(mounted)
        mounted.redis_address()
    return mounted


def _bounded(work: Callable[[], T], what: str, otherwise: T) -> T:
    """What `work` returns or raises, done in a thread: a file system that hangs is a warning, not a job that does not start."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except (OSError, KcoordError) as error:
            done.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    if done.done():
        return done.result()
    say(f"{what}: no answer for {_PATIENCE:g} s; the job starts without waiting for it")
    return otherwise


def check_directories(settings: Settings, *, store: bool = True) -> None:
    """Raises `SettingsError` if the local directory or, unless it is not `store`'s turn yet, the store can never be used.

    A disk that is full, read-only or out of reach just now is a warning of the agent's, and not a job that does not start.
    """
    try:
        make_private(settings.local_dir)
    except StoreError as error:
        _refuse("KCOORD_LOCAL_DIR", error)
    if settings.store is not None and store:
        try:
            _try_store(settings)
        except StoreError as error:
            _refuse("KCOORD_STORE", error)


def _refuse(variable: str, error: StoreError) -> None:
    if not error.passing:
        raise SettingsError(f"{variable}={error}") from error


def _try_store(settings: Settings) -> None:
    root = settings.store_root
    assert root is not None

    def attempt() -> None:
        Store(root, Trust.of(settings) if settings.spawn else Trust(settings.trust or "off")).open()

    _bounded(attempt, f"KCOORD_STORE={settings.store}", None)


def job_name(settings: Settings, given: str | None = None) -> str:
    """What the statistics are kept under: the same on all nodes if anything names the job, else this launch's own."""
    if settings.job:
        return settings.job
    for name in (
        given,
        os.environ.get("SLURM_JOB_ID"),
        os.environ.get("PBS_JOBID"),
        os.environ.get("LSB_JOBID"),
        os.environ.get("PMIX_NAMESPACE"),  # Open MPI's name of this mpirun
    ):
        if name and name != "none":
            return plain_text(name, LONGEST_JOB)
    return uuid.uuid4().hex[:12]


class Supervisor:
    """Keeps one agent running. `settings.socket_path` is where ranks find it."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._listener: Any = None
        self._identity: tuple[int, int] | None = None
        self._thread: threading.Thread | None = None
        self._attendance: Attendance | None = None
        self._handed_over = False

    @property
    def owns_agent(self) -> bool:
        return self._listener is not None

    def start(self) -> None:
        """Use the agent that listens, or start one. Raises OSError or `KcoordError`."""
        path = self.settings.socket_path
        endpoint.make_directory(self.settings)
        with endpoint.agent_lock(path, self.settings.agent_timeout):
            try:
                endpoint.connect(path, self.settings.agent_timeout).close()
                self._attendance = Attendance(self.settings)
                return
            except (FileNotFoundError, ConnectionRefusedError):
                self._listener = endpoint.bind(path)
                self._identity = endpoint.identity_of(path)
        try:
            self._process = self._launch()
        except BaseException:
            self._close()  # a socket that nobody serves would cost every claim its time-out
            raise
        self._thread = threading.Thread(target=self._keep_running, name="kcoord-supervisor", daemon=True)
        self._thread.start()

    def leave(self) -> bool:
        """Whether the summary is this launcher's to print: no other one of this node uses the agent, and it answers.

        If another one uses it, an agent of ours goes on, and `stop` leaves it alone.
        """
        if self._attendance is not None:
            return self._attendance.is_last()
        if self._listener is None:
            return False
        stays = hand_over(self.settings)
        if stays:
            self._stopping.set()
            self._listener.close()  # its name stays
            self._listener, self._handed_over = None, True
        return stays is False

    def stop(self) -> None:
        """Drain and end the agent, if it is ours; its socket goes with it, also if a signal's exception ends the wait."""
        self._stopping.set()
        if self._attendance is not None:
            self._attendance.end(_STOP_TIMEOUT)
        if self._handed_over:
            return
        if self._listener is not None:
            self._unlink()  # first: whoever comes now needs an agent that stays; and mpirun may kill us while we wait
        try:
            if self._process is not None:
                self._process.terminate()
                try:
                    self._process.wait(_STOP_TIMEOUT)
                except subprocess.TimeoutExpired:
                    say("the agent did not end in time and is killed")
                    self._process.kill()
                    self._process.wait()
            if self._thread is not None:
                self._thread.join(_STOP_TIMEOUT)
        finally:
            if self._listener is not None:
                self._close()

    def _unlink(self) -> None:
        """Under the lock, and only if the name is still ours: another launcher may have bound it since."""
        path = self.settings.socket_path
        with suppress(OSError), endpoint.agent_lock(path, self.settings.agent_timeout):
            endpoint.unlink_own(path, self._identity)

    def _close(self) -> None:
        self._unlink()
        self._listener.close()
        self._listener = None

    def _launch(self) -> subprocess.Popen[bytes]:
        return spawn.start_process(self._listener, ["--parent", str(os.getpid())], self.settings)

    def _keep_running(self) -> None:
        restarts, launched = 0, time.monotonic()
        while restarts < _MOST_RESTARTS:
            assert self._process is not None
            code = self._process.wait()
            if self._stopping.is_set():
                return
            restarts = restarts + 1 if time.monotonic() - launched < _LASTS else 1
            say(f"the agent ended with code {code} and is started again")
            time.sleep(0.05)
            try:
                self._process, launched = self._launch(), time.monotonic()
            except (OSError, KcoordError) as error:
                say(f"the agent cannot be started again: {error}")
                break
            if self._stopping.is_set():
                self._process.terminate()
        say("the agent is not started again; kernels are compiled without coordination")
        self._close()


@contextmanager
def supervised(settings: Settings, job: str) -> Iterator[dict[str, str]]:
    """Run an agent for the block; yields the environment that ranks need. At the end prints one line of summary.

    Whatever fails here is said in one line, and the job runs without kcoord: then the environment says so.
    """
    settings = replace(settings, job=job, socket=settings.socket_path)
    if not settings.spawn:  # a sidecar's agent, or a service's: theirs to start, and to start again
        if why := await_agent(settings, settings.agent_timeout):
            say(f"{why}; none is started (KCOORD_SPAWN=0), and ranks compile for themselves until there is one")
        try:
            yield rank_environment(settings)
        finally:
            counters = _statistics(settings, job)
            if counters is not None:
                say(closing_line(counters, job))
        return
    supervisor = Supervisor(settings)
    failure: Exception | None = None
    try:
        supervisor.start()
    except (OSError, KcoordError) as error:
        failure = error
    if failure is not None:
        say(f"{failure}; the job runs without kcoord")
        yield {variable("disable"): "1"}
        return
    try:
        yield rank_environment(settings, spawn=not supervisor.owns_agent)
    finally:
        try:
            counters = _statistics(settings, job) if supervisor.leave() else None
            if counters is not None:
                say(closing_line(counters, job))
        finally:
            supervisor.stop()


def closing_line(counters: dict[str, float], job: str) -> str:
    """The summary of a job, and how to ask for more of it."""
    more = f"; more: kcoord report {shlex.quote(job)}" if counters["requests"] else ""
    return summary(counters) + more


def rank_environment(settings: Settings, *, spawn: bool = False) -> dict[str, str]:
    """Settings for the ranks: where the agent is, and no password.

    `spawn`: they may start one, because the agent that was found is another launcher's and may end before they do.
    """
    environment = child_environ(settings, os.environ)
    for spec in FIELDS:
        value = getattr(settings, spec.name)
        if value is not None and spec.name not in SECRETS:
            environment[variable(spec.name)] = str(int(value)) if isinstance(value, bool) else str(value)
    environment[variable("spawn")] = str(int(spawn))
    if settings.signing_key_file is not None or settings.signing_key is not None:
        # its default depends on the keys, which they do not have; nor need we be able to read the file of a sidecar's
        environment[variable("trust")] = settings.trust or "require"
    return environment


@contextmanager
def applied(environment: dict[str, str]) -> Iterator[None]:
    """`os.environ` with `environment`, and without kcoord's secrets, for the block."""
    before = dict(os.environ)
    os.environ.update(environment)
    if environment:
        for name in SECRETS:
            os.environ.pop(variable(name), None)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _statistics(settings: Settings, job: str) -> dict[str, float] | None:
    client = AgentClient(replace(settings, spawn=False), Notices())
    try:
        reply = client.ask({"op": "stats", "job": job})
    finally:
        client.close()
    return reply["counters"] if reply and reply.get("op") == "stats" else None
