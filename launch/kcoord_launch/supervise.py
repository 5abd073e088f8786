"""The agent of a launched job: found or started, restarted if it dies, asked for a summary, stopped.

A launcher that finds another launcher's agent on the node attends it, as under ``srun --ntasks-per-node=8 kcoord exec -- …``: the
agent ends with the last of them. The last one of each job prints its summary. No launcher waits for another one: no exit code is
delayed.

The launcher owns the listening socket. It restarts a dead agent on the same socket, so ranks that connect meanwhile wait in the
backlog until the new agent is up.
"""

from __future__ import annotations

import os
import platform
import select
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from kcoord.default_dir import why_temporary
from kcoord.errors import KcoordError
from kcoord.files.daemon import in_daemon
from kcoord.protocol import endpoint
from kcoord.protocol.endpoint import await_agent, why_silent
from kcoord.protocol.messages import Attend, Done, HandOver, Leave, Left
from kcoord.rank import spawn
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings, variable
from kcoord.telemetry.events import Notices
from kcoord.telemetry.figures import summary, troubles
from kcoord_launch.console import say
from kcoord_launch.environment import rank_environment

_STOP_TIMEOUT = 20.0  # seconds
_MOST_RESTARTS = 20  # of agents that end early
_MOST_TROUBLES = 3  # lines before the last one
_MOST_COMPARED = 2000  # of a job's kernels
_MANY = 8  # compiles; of a job with fewer no kernels are compared
_LISTED_WITHIN = 2.0  # seconds for the manifests of the local directory
_EARLY = 60.0  # seconds; an agent that ends later says nothing about the next one


class Attendance:
    """Keeps a running agent from ending, by an open connection. Not guaranteed: that the agent is still alive."""

    def __init__(self, settings: Settings) -> None:
        self._client = AgentClient(replace(settings, spawn=False), Notices())  # keeps one open connection
        self._client.ask(Attend(settings.job), Done, quietly=True)
        self._ends = 0

    def is_last_of_job(self) -> bool:
        """True if no other launcher of the job attends or owns the agent."""
        answer = self._client.ask(Leave(), Left, quietly=True)
        if answer is None:
            return False  # a dead agent has no summary
        self._ends = answer.ends
        return answer.last_of_job

    def end(self, timeout: float) -> None:
        """Leave. If that ends the agent, wait at most `timeout` seconds for its last publishes.

        The end of a launcher may end the Slurm step, and every process in it.
        """
        ended = None
        if self._ends:
            with suppress(OSError):
                ended = os.pidfd_open(self._ends)
        self._client.close()
        if ended is not None:
            poll = select.poll()  # `select` refuses descriptors from 1024 on
            poll.register(ended, select.POLLIN)
            poll.poll(timeout * 1000)
            os.close(ended)


def _hand_over(settings: Settings) -> Left | None:
    """Announce the end of this launcher to its agent. None: it does not answer."""
    with closing(AgentClient(replace(settings, spawn=False), Notices())) as client:
        return client.ask(HandOver(), Left, quietly=True)


class Supervisor:
    """Keeps one agent running, at `settings.socket_path`."""

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
            self._listener = endpoint.bind_unless_served(path, self.settings.agent_timeout)
            if self._listener is None:
                self._attendance = Attendance(self.settings)
                return
            self._identity = endpoint.identity_of(path)
        try:
            self._process = self._launch()
        except BaseException:
            self._close()  # a socket that nobody serves would cost every claim its time-out
            raise
        self._thread = threading.Thread(target=self._keep_running, name="kcoord-supervisor", daemon=True)
        self._thread.start()

    def leave(self) -> bool:
        """True if this launcher is to print the summary: no other launcher of its job uses the agent, and it answers.

        If another one uses it, an agent of ours keeps running, and `stop` leaves it alone.
        """
        if self._attendance is not None:
            return self._attendance.is_last_of_job()
        if self._listener is None:
            return False
        left = _hand_over(self.settings)
        if left is None:
            say(f"no agent answers at {self.settings.socket_path}: there is no summary; was its directory removed?")
            return False
        if not left.last:
            self._stopping.set()
            self._listener.close()  # the socket's name stays
            self._listener, self._handed_over = None, True
        return left.last_of_job

    def stop(self) -> None:
        """Drain and end the agent, if it is ours, and remove its socket, even if a signal's exception ends the wait."""
        self._stopping.set()
        if self._attendance is not None:
            self._attendance.end(_STOP_TIMEOUT)
        if self._handed_over:
            return
        if self._listener is not None:
            self._unlink()  # first: a newcomer needs an agent that stays, and mpirun may kill us while we wait
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
        endpoint.unlink_own(self.settings.socket_path, self._identity, self.settings.agent_timeout)

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
            restarts = restarts + 1 if time.monotonic() - launched < _EARLY else 1
            say(f"the agent ended with code {code} and is restarted")
            time.sleep(0.05)
            try:
                self._process, launched = self._launch(), time.monotonic()
            except (OSError, KcoordError) as error:
                say(f"the agent cannot be restarted: {error}")
                break
            if self._stopping.is_set():
                self._process.terminate()
        say("the agent is not restarted; kernels are compiled without coordination")
        self._close()


@contextmanager
def supervised(
    settings: Settings, job: str, *, nodes: int = 1, has_kcoord: bool = True, sums_up: bool = True
) -> Iterator[dict[str, str]]:
    """Run an agent for the block; yields the variables of the ranks. Prints a summary at the end, if it `sums_up`.

    `nodes`: the number of nodes of the job. `has_kcoord`: see `rank_environment`.
    A failure is one line, and the job runs without kcoord: then the variables turn it off.
    """
    launched = time.time()
    settings = replace(settings, job=job, socket=settings.socket_path)
    if not settings.spawn:  # a sidecar or a service starts the agent, and restarts it
        if why := await_agent(settings, settings.agent_timeout):
            say(f"{why}; none is started (KCOORD_SPAWN=0), and ranks compile for themselves until there is one")
        try:
            yield rank_environment(settings, has_kcoord=has_kcoord)
        finally:
            if sums_up and not (why and why_silent(settings, settings.agent_timeout)):
                _say_summary(settings, job, nodes, launched)
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
        yield rank_environment(settings, spawn=not supervisor.owns_agent, has_kcoord=has_kcoord)
    finally:
        try:
            if supervisor.leave() and sums_up:
                _say_summary(settings, job, nodes, launched)
        finally:
            supervisor.stop()


def _say_summary(settings: Settings, job: str, nodes: int, launched: float) -> None:
    """At most `_MOST_TROUBLES` lines about what went wrong, and the last line, whose form is fixed."""
    with closing(AgentClient(replace(settings, spawn=False), Notices())) as client:
        stats = client.stats(job)
    if stats is None:
        return
    found, report = stats["figures"], f"kcoord report {shlex.quote(job)}"
    lines = troubles(found)
    if found["compiles"] and settings.store is None and nodes > 1:
        lines.append("each node compiled for itself: set KCOORD_STORE to a directory that all nodes share")
    elif found["compiles"] and settings.store is None and (why := why_temporary(settings.local_dir)):
        lines.append(
            f"the kernels stay in {settings.local_dir}, as {why}; a job that finds another directory there compiles them "
            f"again, in {found['compile_seconds']:.1f} s: set KCOORD_LOCAL_DIR to a local directory that outlives jobs, or "
            "KCOORD_STORE"
        )
    if found["compiles"] >= _MANY:
        lines += _many_keys(settings, launched)
    for line in lines[:_MOST_TROUBLES]:
        say(line)
    if more := len(lines[_MOST_TROUBLES:]):
        say(f"… and {more} more: {report}")
    where = "this node: " if nodes > 1 else ""
    say(f"{where}{summary(found, launched)}" + (f"; {report}" if found["requests"] else ""))


def _many_keys(settings: Settings, launched: float) -> list[str]:
    """Lines about kernels that were compiled on this node since then for many values of one argument.

    None if the local directory cannot be listed in `_LISTED_WITHIN` seconds: the report has them, too.
    """
    from kcoord.artifacts.catalog import newest_first  # both not before the job
    from kcoord.artifacts.many_keys import many_keys

    def look() -> list[str]:
        made = newest_first(replace(settings, store=None), since=launched)
        ours = (m for m in made if m.origin.created >= launched and m.origin.host == platform.node())
        return [str(each) for each in many_keys(islice(ours, _MOST_COMPARED))]

    try:
        return in_daemon(look).result(_LISTED_WITHIN)
    except (OSError, KcoordError, RuntimeError):  # it hangs, or is being removed, or there are no more threads
        return []
