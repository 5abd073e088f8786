"""The processes of a run share its fork servers, which end with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import psutil

from tests.support.shared_servers import ForkServers
from tests.support.waiting import eventually

_ASKS = """
import os
from tests.support.shared_servers import fork_server
process = fork_server(("json", "statistics")).start(
    ["-c", "import os, sys; print(os.getppid(), 'statistics' in sys.modules, os.environ.get('MINE'))"],
    dict(os.environ, MINE=str(os.getpid())), "/",
)
print(os.getpid(), process.communicate(60)[0])
"""
_BEGINS = """
import os, sys
from tests.support.shared_servers import ForkServers, fork_server
os.environ.update((servers := ForkServers()).variables)
print(*servers.variables.values())
print(fork_server(()).start(["-c", "import os; print(os.getppid())"], os.environ, "/").communicate(60)[0], flush=True)
sys.stdin.read()
"""


def has_ended(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_processes_of_a_run_share_a_server_that_outlives_who_started_it() -> None:
    servers, command = ForkServers(), [sys.executable, "-c", _ASKS]
    environ = {**os.environ, **servers.variables}
    asking = [subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=60)[0].split() for process in asking]
    said.append(subprocess.check_output(command, env=environ, text=True, timeout=60).split())
    assert {(imported, mine == pid) for pid, _, imported, mine in said} == {("True", True)}
    (server,) = {int(parent) for _, parent, _, _ in said}
    assert not has_ended(server)
    servers.close()
    eventually(lambda: has_ended(server))


def test_servers_end_with_a_run_that_is_killed() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _BEGINS], stdin=pipe, stdout=pipe, text=True) as run:
        assert run.stdout is not None
        directory, server = run.stdout.readline().strip(), int(run.stdout.readline())
        assert not has_ended(server)
        run.kill()
    eventually(lambda: has_ended(server))
    shutil.rmtree(directory)
