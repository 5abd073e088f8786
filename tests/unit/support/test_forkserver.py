"""Processes of a fork server behave as those of an interpreter of their own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.support import hosts
from tests.support.forkserver import ForkServer
from tests.support.waiting import eventually

ENDS = {
    "nothing": "print('done')",
    "a number": "import sys; sys.exit(3)",
    "a text": "import sys; sys.exit('no such file')",
    "an exception": "1 / 0",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
    "an interrupt": "raise KeyboardInterrupt",
    "a thread": "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('last'))).start()",
    "a function of atexit": "import atexit; atexit.register(print, 'bye')",
    "lone os._exit": "import os; os._exit(5)",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer(["json"], os.environ)
    yield server
    server.close()


@pytest.mark.parametrize("program", ENDS.values(), ids=ENDS)
def test_a_process_ends_as_one_of_a_new_interpreter(server: ForkServer, program: str, tmp_path: Path) -> None:
    forked = server.start(["-c", program], os.environ, tmp_path)
    out, err = forked.communicate(60)
    true = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert (forked.returncode, out) == (true.returncode, true.stdout)
    assert err.splitlines()[-1:] == true.stderr.splitlines()[-1:]


TELLS = "import os, sys, json; print(json.dumps([sys.argv[1:], sys.path, __name__, os.getcwd(), os.environ.get('X')]))"


@pytest.mark.parametrize("kind", ["-c", "-m", "a path"])
def test_a_program_finds_its_arguments_directory_and_variables(server: ForkServer, kind: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(TELLS)
    first = {"-c": ["-c", TELLS], "-m": ["-m", "program"], "a path": [str(tmp_path / "program.py")]}[kind]
    environ = {**os.environ, "X": "1", "PYTHONPATH": str(tmp_path / "modules")}
    found = server.start([*first, "a", "b c"], environ, tmp_path).communicate(60)[0]
    assert found == subprocess.check_output([sys.executable, *first, "a", "b c"], text=True, cwd=tmp_path, env=environ)


def test_a_process_has_the_streams_and_descriptors_that_it_is_given(server: ForkServer, tmp_path: Path) -> None:
    pipes = [os.pipe() for _ in range(6)]
    (read_in, write_in), (read_out, write_out), (read_err, write_err), *passed = pipes
    numbers = [write for _, write in passed]
    program = f"import os, sys; sys.stderr.write(input()); print('out'); [os.write(n, b'%d' % n) for n in {numbers}]"
    process = server.start(
        ["-c", program], os.environ, tmp_path, streams=(read_in, write_out, write_err), pass_fds=numbers
    )
    for each in (read_in, write_out, write_err, *numbers):
        os.close(each)
    os.write(write_in, b"told\n")
    assert process.wait(60) == 0
    for read, expected in [(read_out, b"out\n"), (read_err, b"told"), *((r, b"%d" % w) for r, w in passed)]:
        assert os.read(read, 99) == expected
        assert os.read(read, 99) == b"", "the server has closed its copy"
        os.close(read)
    os.close(write_in)


def test_a_process_has_the_modules_and_a_life_of_its_own(server: ForkServer, tmp_path: Path) -> None:
    processes = [
        server.start(["-c", "import sys, time; assert 'json' in sys.modules; time.sleep(600)"], os.environ, tmp_path)
        for _ in range(2)
    ]
    assert len({process.pid for process in processes}) == 2
    with pytest.raises(subprocess.TimeoutExpired):
        processes[0].wait(0.1)
    processes[0].kill()
    assert processes[0].wait(60) == -signal.SIGKILL
    assert processes[1].poll() is None
    processes[1].terminate()
    assert processes[1].wait(60) == -signal.SIGTERM
    for process in processes:
        process.communicate()


@pytest.mark.parametrize("again", ["", "1"], ids=["itself", "and as it executes itself"])
def test_a_process_shows_its_own_command_and_variables(server: ForkServer, tmp_path: Path, again: str) -> None:
    execute = "if os.environ.pop('AGAIN', ''): os.execv(sys.executable, sys.orig_argv)"
    program = f"import os, sys\n{execute}\nos.write(1, b'here')\ninput()"
    (read_in, write_in), (read_out, write_out) = os.pipe(), os.pipe()
    process = server.start(
        ["-c", program], {"X": "x" * 9000, "AGAIN": again}, tmp_path, streams=(read_in, write_out, write_out)
    )
    for each in (read_in, write_out):
        os.close(each)
    assert os.read(read_out, 99) == b"here"
    shown = psutil.Process(process.pid)
    assert [word for word in shown.cmdline() if word] == [sys.executable, "-c", program]
    assert {name: value for name, value in shown.environ().items() if name != "LC_CTYPE"} in (
        {"X": "x" * 9000, "AGAIN": ""},
        {"X": "x" * 9000},
    )
    os.write(write_in, b"go\n")
    assert process.wait(60) == 0
    for each in (write_in, read_out):
        os.close(each)


def test_a_process_is_of_the_server_s_session_or_has_its_own(server: ForkServer, tmp_path: Path) -> None:
    program = "import os; print(os.getsid(0) == os.getpid(), os.getsid(0))"
    for own, expected in (True, "True"), (False, f"False {os.getsid(0)}"):
        process = server.start(["-c", program], os.environ, tmp_path, start_new_session=own)
        assert process.communicate(60)[0].startswith(expected)


ASKS = """
import os, sys
from tests.support.forkserver import ForkClient
other = ForkClient(sys.argv[1], os.environ).start(["-c", "import os; print(os.getppid())"], os.environ, os.getcwd())
print(os.getppid(), other.communicate(60)[0])
"""


_WHY_NOT = hosts.why_not()


@pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)
def test_a_process_is_in_the_network_and_the_mounts_of_who_asks_for_it(server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "mounted").mkdir()
    looks = "import os, socket; print(*sorted(name for _, name in socket.if_nameindex()), os.listdir('mounted'))"
    asks = ASKS.replace("import os; print(os.getppid())", looks)
    program = shlex.join([sys.executable, "-c", asks, server.address])
    mounts = f"mount -t tmpfs tmpfs mounted && touch mounted/here && {program}"
    alone = ["unshare", "--net", "--mount", "--propagation", "private", "sh", "-c", mounts]
    found = subprocess.check_output(alone, text=True, cwd=tmp_path, timeout=60)
    assert found.split()[1:] == ["lo", "['here']"]


def test_what_runs_ends_with_a_server_that_is_killed(tmp_path: Path) -> None:
    server = ForkServer([], os.environ)
    process = server.start(["-c", "import time; time.sleep(600)"], os.environ, tmp_path)
    server._server.kill()
    assert process.wait(60) == -signal.SIGKILL
    eventually(lambda: not psutil.pid_exists(process.pid) or psutil.Process(process.pid).status() == "zombie")
    server.close()
    process.communicate()


def test_a_server_outlives_an_interrupt_and_processes_of_its_modules(tmp_path: Path) -> None:
    (tmp_path / "starts.py").write_text("import subprocess; subprocess.Popen(['true'])")
    server = ForkServer(["starts"], {**os.environ, "PYTHONPATH": str(tmp_path)})
    for _ in range(2):
        process = server.start(["-c", "print('here')"], os.environ, tmp_path)
        assert process.communicate(60) == ("here\n", "")
        os.kill(server._server.pid, signal.SIGINT)
    server.close()
