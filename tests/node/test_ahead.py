"""What a rank does while it waits for another rank's compile: upcoming keys by a helper, and the kernel's launcher."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

import kcoord.rank.ahead
from kcoord import cgroups as limits
from kcoord.agent.watch import idle_cores as permits_module
from kcoord.agent.watch.idle_cores import Permits
from kcoord.artifacts.manifest import Manifest
from kcoord.profiles.parts import load_profile, save_part
from kcoord.profiles.recipe import Recipe
from kcoord.protocol import endpoint
from kcoord.protocol.own_socket import OwnSocket
from kcoord.rank import spawn
from kcoord.rank.ahead import WorkAhead
from kcoord.rank.client import AgentClient, Lead
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord.warmup.ahead_process import permitted, work
from kcoord.warmup.tasks import Task
from tests.support.command import KCOORD
from tests.support.living import words_of
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, sandboxed
from tests.support.triton_ranks import RANK, homes, hooked, report

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[list[Recipe], Manifest]]:
    """A profile of six kernels, and the manifest of the first one that a rank asks for."""
    with sandboxed() as box:
        report(box.start(RANK, "--kernels", "6", **hooked(box, 0, KCOORD_PROFILE="six")))
        report(box.start(RANK, "--kernels", "1", **hooked(box, 0, "one")))
        settings = Settings.from_environ({"KCOORD_LOCAL_DIR": str(box.local)})
        eventually(lambda: (settings.local_dir / "profiles" / "six").is_dir())
        eventually(lambda: len(load_profile(settings, "six")) == 6)
        (first,) = homes(box, "one")
        yield load_profile(settings, "six"), Manifest.decode((first / "kcoord-manifest.msgpack").read_bytes())


_SEES_IDLE_CORES = """
import sys
from types import SimpleNamespace
import psutil
psutil.cpu_times_percent = lambda: SimpleNamespace(idle=100.0)
from kcoord.agent.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


def start_agent(settings: Settings) -> None:
    """One that permits work ahead, whatever else this machine does."""
    path = settings.socket_path
    endpoint.make_directory(settings)
    with endpoint.agent_lock(path, 20), endpoint.bind(path) as listener:
        fd = listener.fileno()
        command = [sys.executable, "-c", _SEES_IDLE_CORES, "kcoord.agent", "--fd", str(fd), "--daemon"]
        subprocess.run(command, pass_fds=[fd], env=spawn.agent_environment(settings), check=True, timeout=60)


@contextmanager
def held(sandbox: Sandbox, first: Manifest) -> Iterator[None]:
    """Somebody compiles the first kernel, and does not get on."""
    settings = Settings.from_environ(sandbox.env())
    start_agent(settings)
    home = sandbox.local / "triton" / "held"
    client = AgentClient(settings, Notices())
    lead = client.claim(first.key, home)
    assert isinstance(lead, Lead)
    try:
        yield
    finally:
        client.give_up(lead, first.key)
        client.close()


def give(sandbox: Sandbox, recipes: list[Recipe]) -> None:
    save_part(sandbox.local / "profiles" / "six", recipes)


def helpers(sandbox: Sandbox) -> list[psutil.Process]:
    return [p for p in sandbox.processes() if any("kcoord.warmup.ahead_process" in word for word in words_of(p))]


def kernels(sandbox: Sandbox) -> list[Path]:
    """Without the launchers that are built where there is a GPU."""
    return [home for home in homes(sandbox) if list(home.glob("*.cubin"))]


def waiting(sandbox: Sandbox) -> int:
    client = AgentClient(Settings.from_environ(sandbox.env()), Notices())
    status = client.status()
    client.close()
    assert status is not None
    return sum(len(f["waiting"]) for f in status["flights"])


def test_while_a_rank_waits_upcoming_keys_are_compiled_beside_it(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    recipes, first = recorded
    give(sandbox, recipes)
    with held(sandbox, first):
        rank = sandbox.start(RANK, "--kernels", "6", **hooked(sandbox, 0, KCOORD_PROFILE="six"))
        eventually(lambda: len(kernels(sandbox)) == 5, 60, "all but the one that is waited for")
    said = report(rank)
    assert (len(said["compiled"]), len(said["loaded"])) == (1, 5)
    eventually(lambda: not helpers(sandbox), what="the helper ended with its rank")


def test_a_helper_ends_with_a_rank_that_is_killed(sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]) -> None:
    recipes, first = recorded
    give(sandbox, recipes)
    with held(sandbox, first):
        rank = sandbox.start(RANK, "--kernels", "6", **hooked(sandbox, 0, KCOORD_PROFILE="six"))
        eventually(lambda: helpers(sandbox), 60)
        rank.send_signal(signal.SIGKILL)
        rank.communicate()
        eventually(lambda: not helpers(sandbox))


@pytest.mark.parametrize(
    "settings",
    [{"KCOORD_PROFILE": None}, {"KCOORD_PROFILE": "six", "KCOORD_AHEAD": "0"}],
    ids=["no profile", "ahead=0"],
)
def test_there_is_no_helper_where_none_is_wanted(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest], settings: dict[str, str | None]
) -> None:
    recipes, first = recorded
    give(sandbox, recipes)
    with held(sandbox, first):
        rank = sandbox.start(RANK, "--kernels", "1", **hooked(sandbox, 0, **settings))
        eventually(lambda: waiting(sandbox) == 1, 60)
        assert not helpers(sandbox)
    assert len(report(rank)["compiled"]) == 1


RESTORES_SIGPIPE = """
import pathlib, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
sys.path.append(pathlib.Path("an entry that is not text"))
sys.argv[:2] = [sys.argv[1]]
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_first_job_has_no_profile_yet_and_its_helper_ends_by_itself(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    with held(sandbox, recorded[1]):
        rank = sandbox.start("-c", RESTORES_SIGPIPE, RANK, "--kernels", "2", **hooked(sandbox, 0, KCOORD_PROFILE="six"))
        eventually(lambda: helpers(sandbox), 60)
        eventually(lambda: not helpers(sandbox), what="it has nothing to do")
    assert len(report(rank)["compiled"]) == 2


def helper(sandbox: Sandbox, **more: str) -> subprocess.Popen[bytes]:
    environment = {k: v for k, v in hooked(sandbox, 0, **more).items() if v is not None}
    path = [str(sandbox.root), str(PROGRAMS), *sys.path]
    command = [sys.executable, "-c", kcoord.rank.ahead._PROGRAM, "six", str(os.getpid()), *path]
    return subprocess.Popen(command, env=sandbox.env(**environment), stdin=subprocess.PIPE, cwd=sandbox.root)


def tell(process: subprocess.Popen[bytes], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line.encode() + b"\n")
    process.stdin.flush()


def test_a_helper_compiles_all_that_is_left_and_ends(sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]) -> None:
    give(sandbox, recorded[0])
    process = helper(sandbox)
    tell(process, "go")
    assert process.wait(60) == 0
    assert len(kernels(sandbox)) == 6
    assert process.stdin is not None
    process.stdin.close()


class _Go(threading.Event):
    asked = 0

    def wait(self, timeout: float | None = None) -> bool:
        self.asked += 1
        return super().wait(timeout)


def test_a_helper_takes_its_next_key_only_while_its_rank_waits() -> None:
    go, ran = _Go(), []

    def run(name: str) -> str:
        ran.append(name)
        go.clear()  # the rank's wait ended in the middle of it
        return "compiled"

    tasks = [Task(name, lambda waits, name=name: run(name)) for name in "abc"]  # type: ignore[misc]
    rests: list[str] = []
    thread = threading.Thread(target=work, args=(tasks, go, lambda: True, lambda: rests.append("".join(ran))))
    thread.start()
    for n, so_far in enumerate(("", "a", "ab", "abc")):
        eventually(lambda n=n: go.asked == min(n + 1, 3) and (n < 3 or not thread.is_alive()))  # type: ignore[misc]
        assert "".join(ran) == so_far
        go.set()
    thread.join()
    assert rests == ["", "a", "ab"], "it keeps no permit while it rests"


def test_a_helper_asks_before_each_key_and_passes_over_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kcoord.warmup.ahead_process._ASK_AGAIN", 0.0)
    said: list[str] = []
    answers, go = iter([False, False, True, True]), threading.Event()
    go.set()

    def may() -> bool:
        said.append("may I?")
        return next(answers)

    def fails(waits: bool) -> str:
        said.append("a")
        raise SystemExit("a module that ends whoever imports it")

    def runs(waits: bool) -> str:
        said.append("b")
        return "compiled"

    work([Task("a", fails), Task("b", runs)], go, may, lambda: said.append("rests"))
    assert said == ["may I?", "may I?", "may I?", "a", "may I?", "b"]


@pytest.mark.parametrize("most", ["0", "1"])
def test_the_agent_grants_no_more_than_it_is_set_to(sandbox: Sandbox, most: str) -> None:
    settings = Settings.from_environ(sandbox.env())
    client = AgentClient(settings, Notices())
    agent = sandbox.start(*KCOORD, "agent", KCOORD_AHEAD=most)
    eventually(settings.socket_path.exists)
    if most == "0":
        assert not permitted(client)
    else:
        eventually(lambda: permitted(client), 60, "a core idles")
    client.close()
    agent.terminate()
    agent.communicate()


def test_without_an_agent_there_is_no_permit(sandbox: Sandbox) -> None:
    assert not permitted(AgentClient(Settings.from_environ(sandbox.env(KCOORD_SPAWN="0")), Notices()))


def test_a_helper_ends_when_its_pipe_does(sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]) -> None:
    give(sandbox, recorded[0])
    process = helper(sandbox)
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0
    assert kernels(sandbox) == []


def test_a_forked_child_neither_holds_nor_ends_its_parents_helper(tmp_path: Path) -> None:
    settings = Settings.from_environ({"KCOORD_PROFILE": "six", "KCOORD_LOCAL_DIR": str(tmp_path)})
    ahead = WorkAhead(settings, Notices())
    ours, theirs = socket.socketpair()
    with theirs:
        reads = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        sleeper = subprocess.Popen(reads, stdin=theirs.fileno())
    ahead._control = OwnSocket(ours)
    pipe = ahead._control.fileno()
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            ahead.forget_after_fork()
            ahead.close()
            try:
                os.fstat(pipe)
            except OSError:
                os.write(writing, b"closed")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert select.select([reading], [], [], 20)[0]
    assert os.read(reading, 10) == b"closed"
    assert sleeper.poll() is None
    ahead.close()
    assert sleeper.wait(20) == 0
    os.close(reading)
    os.close(writing)


def test_a_helper_whose_control_the_script_closed_is_told_nothing_through_what_has_its_number_now(
    tmp_path: Path,
) -> None:
    settings = Settings.from_environ({"KCOORD_PROFILE": "six", "KCOORD_LOCAL_DIR": str(tmp_path)})
    ahead = WorkAhead(settings, Notices())
    ours, theirs = socket.socketpair()
    ahead._control = OwnSocket(ours)
    number = ahead._control.fileno()
    os.close(number)
    mine, other = socket.socketpair()
    with theirs, mine, other:
        assert number in (mine.fileno(), other.fileno())
        with ahead.during(None) as waits:
            assert waits is not None
            waits()
        ahead.close()
        for end in (mine, other):
            end.send(b"x")
        assert [end.recv(100, socket.MSG_DONTWAIT) for end in (mine, other)] == [b"x", b"x"]


def test_an_alarm_of_the_script_while_its_helper_is_started_is_the_scripts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class TooSlow(RuntimeError):
        pass

    def too_slow(number: int, frame: Any) -> None:
        raise TooSlow

    def popen(*args: Any, **how: Any) -> Any:
        os.kill(os.getpid(), signal.SIGALRM)
        raise AssertionError("the alarm has raised")

    settings = Settings.from_environ({"KCOORD_PROFILE": "six", "KCOORD_LOCAL_DIR": str(tmp_path)})
    ahead = WorkAhead(settings, Notices())

    def waits() -> None:
        with ahead.during(None) as begin:
            assert begin is not None
            begin()

    monkeypatch.setattr(subprocess, "Popen", popen)
    before = signal.signal(signal.SIGALRM, too_slow)
    try:
        with pytest.raises(TooSlow):
            waits()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ahead._waiting == 0


@pytest.mark.parametrize("executable", ["no python", "", None])
def test_a_helper_that_cannot_start_is_told_once_and_the_rank_waits_on(
    executable: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", executable and str(tmp_path / executable))
    settings = Settings.from_environ({"KCOORD_PROFILE": "six", "KCOORD_LOCAL_DIR": str(tmp_path)})
    ahead, called = WorkAhead(settings, Notices()), []
    for _ in range(2):
        with ahead.during(lambda: called.append(1)) as waits:
            assert waits is not None
            waits()
    assert len(called) == 2
    assert caplog.text.count("nothing is compiled ahead") == 1


WAITS_FOR_ALL = """
import os
from kcoord.rank.ahead import WorkAhead
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
ahead = WorkAhead(Settings.from_environ(), Notices())
with ahead.during(None) as waits:
    waits()
print("started", flush=True)
input()
try:
    while True:
        os.wait()
except ChildProcessError:
    print("no children")
"""


def test_a_script_that_waits_for_all_its_children_does_not_wait_for_the_helper(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    give(sandbox, recorded[0])
    environment = sandbox.env(**hooked(sandbox, 0, KCOORD_PROFILE="six"))
    rank = subprocess.Popen(
        [sys.executable, "-c", WAITS_FOR_ALL], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == "started\n"
    eventually(lambda: helpers(sandbox), 60)
    out, _ = rank.communicate("\n", timeout=60)
    assert out == "no children\n"
    eventually(lambda: not helpers(sandbox))


def test_a_helper_joins_nothing_that_its_rank_is_in_and_has_the_ranks_settings(tmp_path: Path) -> None:
    settings = Settings.from_environ({"KCOORD_PROFILE": "six"}, local_dir=str(tmp_path), spawn="0", max_wait="7")
    rank = {"RANK": "3", "MASTER_ADDR": "node", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "PMIX_RANK": "3",
            "OMPI_COMM_WORLD_RANK": "3", "PATH": "/bin", "KCOORD_PROFILE": "six"}  # fmt: skip
    found = kcoord.rank.ahead._environment(settings, rank)
    assert not {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"} & found.keys()
    assert (found["RANK"], found["PATH"], found["CUDA_VISIBLE_DEVICES"]) == ("3", "/bin", "")
    again = Settings.from_environ(found)
    assert (again.local_dir, again.spawn, again.max_wait) == (tmp_path, False, 7.0)
    assert (again.profile, again.ahead) == (None, 0)


def test_a_module_that_reads_its_input_or_leaves_a_thread_holds_up_no_helper(sandbox: Sandbox) -> None:
    (sandbox.root / "reads.py").write_text("import sys\nassert sys.stdin.read() == ''\nopen('read', 'w').close()\n")
    (sandbox.root / "thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    )
    give(
        sandbox, [Recipe("triton", module, "f", {}, "cuda:90", 1.0, n) for n, module in enumerate(("thread", "reads"))]
    )
    process = helper(sandbox)
    tell(process, "go")
    assert process.wait(60) == 0
    assert (sandbox.root / "read").exists()
    assert process.stdin is not None
    process.stdin.close()


def test_a_process_that_replays_the_profile_itself_has_no_helper(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    recipes, first = recorded
    give(sandbox, recipes)
    program = (
        f"import sys; sys.path.insert(0, {str(PROGRAMS)!r}); import kcoord; print(kcoord.warmup('six', progress=False))"
    )
    with held(sandbox, first):
        rank = sandbox.start("-c", program, **hooked(sandbox, 0, KCOORD_PROFILE="six"))
        eventually(lambda: waiting(sandbox) == 1, 60, "all is compiled but what is held")
        assert not helpers(sandbox)
    out, err = rank.communicate(timeout=60)
    assert (rank.returncode, out[:10]) == (0, "6 compiled"), err


# Permits.

MUCH = 64 << 30  # bytes of memory


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine of eight cores that idle."""
    here = SimpleNamespace(idle=100.0, iowait=0.0)
    monkeypatch.setattr(permits_module, "cores", lambda: 8.0)
    monkeypatch.setattr(permits_module.psutil, "cpu_times_percent", lambda: here)
    monkeypatch.setattr(permits_module.psutil, "cpu_count", lambda: 8)
    return here


def test_permits_are_bounded_by_number_and_end_with_their_connection(machine: SimpleNamespace) -> None:
    permits = Permits(2)
    assert [permits.ask(owner, MUCH) for owner in (1, 2, 3)] == [True, True, False]
    permits.gone(1)
    assert permits.ask(3, MUCH)
    assert permits.ask(2, MUCH), "for its next key"


def test_permits_are_bounded_by_the_cores_that_idle(machine: SimpleNamespace) -> None:
    machine.idle = 25.0  # two of eight
    permits = Permits(100)
    permits.look()
    assert [permits.ask(owner, MUCH) for owner in range(4)] == [True, True, False, False]
    permits.look()  # and the two at work are seen in what idles from now on
    assert permits.ask(2, MUCH)
    machine.idle = 0.0
    permits.look()
    assert not permits.ask(5, MUCH)
    assert permits.ask(0, MUCH), "who is at work already has its own core"


def test_short_memory_takes_a_permit_away(machine: SimpleNamespace) -> None:
    permits = Permits(100)
    assert permits.ask(1, MUCH)
    assert not permits.ask(1, 1 << 30)
    assert not permits.ask(2, 1 << 30)


def test_memory_that_is_granted_and_not_taken_yet_is_not_granted_twice(machine: SimpleNamespace) -> None:
    permits = Permits(100)
    assert [permits.ask(owner, 9 << 30) for owner in range(3)] == [True, True, False]
    permits.look()
    assert permits.ask(2, 9 << 30), "what the others took is missing in what is free by now"


@pytest.mark.parametrize("version", [1, 2])
def test_a_containers_limits_count(version: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    names = {
        1: ("cpu/job", "memory/job", "cpu.cfs_quota_us", "memory.limit_in_bytes", "memory.usage_in_bytes"),
        2: ("job/step", "job/step", "cpu.max", "memory.max", "memory.current"),
    }
    cpu, memory, quota, most, used = names[version]
    for directory in (cpu, memory):
        (tmp_path / directory).mkdir(parents=True, exist_ok=True)
    here = tmp_path / cpu if version == 1 else (tmp_path / cpu).parent  # a limit above counts as well
    if version == 1:
        (here / quota).write_text("50000\n")
        (here / "cpu.cfs_period_us").write_text("100000\n")
    else:
        (here / quota).write_text("50000 100000\n")
        (tmp_path / cpu / quota).write_text("max 100000\n")
    (tmp_path / memory / most).write_text(f"{8 << 20}\n")
    (tmp_path / memory / used).write_text(f"{7 << 20}\n")
    (tmp_path / memory / "memory.stat").write_text(f"anon 5\ninactive_file {2 << 20}\n")
    membership = tmp_path / "membership"
    membership.write_text("4:memory:/job\n1:cpu,cpuacct:/job\n" if version == 1 else "0::/job/step\n")
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(limits, "_MEMBERSHIP", membership)
    assert limits.cores() == 0.5
    assert limits.free_memory() == 3 << 20


@pytest.mark.parametrize("text", [b"nonsense\n", b"0::/\xff\n", b"\n", b"7:\n"])
def test_a_group_that_cannot_be_read_is_no_limit(text: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the agent would not start."""
    (tmp_path / "membership").write_bytes(text)
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(limits, "_MEMBERSHIP", tmp_path / "membership")
    assert limits.cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize("file", ["cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"])
@pytest.mark.parametrize("text", ["50000\n", "1 2 3\n", "0 0\n", ""])
def test_a_quota_that_says_half_is_no_limit(
    file: str, text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "membership").write_text("0::/\n")
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(limits, "_MEMBERSHIP", tmp_path / "membership")
    assert limits.cores() == len(os.sched_getaffinity(0))


def test_without_a_containers_limits_the_machines_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(limits, "_MEMBERSHIP", tmp_path / "none")
    assert limits.cores() == len(os.sched_getaffinity(0))
    assert limits.free_memory() > 1 << 20


# Launchers.

LAUNCHER = """
import sys, types
sys.path.insert(0, {programs!r})
import triton, kernels
from triton.runtime import build

SOURCE = '''#include <Python.h>
static struct PyModuleDef module = {{PyModuleDef_HEAD_INIT, "launcher", NULL, -1, NULL}};
PyMODINIT_FUNC PyInit_launcher(void) {{ return PyModule_Create(&module); }} /* %s */'''
def make_launcher(source):
    return SOURCE % sorted(source.signature.items())
class Launcher:
    def __init__(self, source, metadata):
        assert metadata.tensordesc_meta is None
        self.file = build.compile_module_from_src(make_launcher(source), "launcher").__file__
class Driver:
    launcher_cls = Launcher
    def get_current_target(self):
        return kernels.SM90
triton.runtime.driver.set_active(Driver())
kernel = kernels.build_scale(2)
from kcoord.backends.triton.modules import _counters as _module_counters
print(_module_counters.read()["compiles"], Launcher(kernel.src, types.SimpleNamespace(tensordesc_meta=None)).file)
print(_module_counters.read()["compiles"])
"""


def launchers(sandbox: Sandbox) -> list[Path]:
    return sorted((sandbox.local / "triton").glob("*/launcher*.so"))


def test_a_launcher_is_built_while_its_kernel_is_waited_for(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    program = LAUNCHER.format(programs=str(PROGRAMS))
    with held(sandbox, recorded[1]):
        rank = sandbox.start("-c", program, **hooked(sandbox, 0))
        eventually(lambda: launchers(sandbox), 60)
        assert homes(sandbox) == [launchers(sandbox)[0].parent], "the kernel is not there yet"
    out, err = rank.communicate(timeout=60)
    assert rank.returncode == 0, err
    before, path, after = out.split()
    assert (before, after) == ("1", "1"), "built once, before it was asked for"
    assert Path(path) == launchers(sandbox)[0]


def test_a_rank_that_waits_for_nobody_builds_no_launcher_ahead(sandbox: Sandbox) -> None:
    patient = "from kcoord.rank import connection_pool\nconnection_pool._AT_ONCE = 60\n"  # a busy machine answers late
    program = patient + LAUNCHER.format(programs=str(PROGRAMS))
    done = sandbox.run("-c", program, **hooked(sandbox, 0))
    assert done.returncode == 0, done.stderr
    before, _, after = done.stdout.split()
    assert (before, after) == ("0", "1")


def test_no_launcher_is_worth_initializing_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is forked afterwards could not use the GPU."""
    import triton

    from kcoord.backends.triton import launchers as triton_launchers

    asked: list[str] = []
    initialized = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: False))
    driver = SimpleNamespace(
        get_current_target=lambda: asked.append("target"), launcher_cls=SimpleNamespace(__module__="b")
    )
    source = SimpleNamespace(signature={"x": "*fp32"})
    monkeypatch.setitem(sys.modules, "torch", initialized)
    monkeypatch.setitem(sys.modules, "b", SimpleNamespace(make_launcher=1))
    config = triton.runtime.driver
    monkeypatch.setattr(config, "_active" if hasattr(config, "_active") else "active", driver)
    triton_launchers.begin(source, None)
    assert asked == []
    initialized.cuda.is_initialized = lambda: True
    triton_launchers.begin(source, None)
    assert asked == ["target"]

    built: list[Any] = []
    kind = SimpleNamespace(__module__="b", is_active=lambda: asked.append("active"))
    monkeypatch.setitem(triton.backends.backends, "nvidia", SimpleNamespace(driver=kind))
    monkeypatch.setattr(sys.modules["b"], "CudaLauncher", SimpleNamespace(__module__="b"), raising=False)
    monkeypatch.setattr(triton_launchers, "_build", lambda *given: built.append(given))
    monkeypatch.setattr(triton_launchers, "_asked", set())
    for device in ("/no/such/device", os.devnull):
        monkeypatch.setitem(triton_launchers._DEVICES, "cuda", (device,))
        triton_launchers.build(source, SimpleNamespace(backend="cuda", warp_size=32))
    assert (len(built), asked) == (1, ["target"])


def test_a_launcher_of_tensor_descriptors_waits_for_its_kernel() -> None:
    from kcoord.backends.triton import launchers as triton_launchers

    kinds: dict[str, Any] = {"x": "*fp32", "n": "i32"}
    builder = SimpleNamespace(__module__="builder")
    sys.modules["builder"] = SimpleNamespace(make_launcher=1)  # type: ignore[assignment]
    try:
        assert triton_launchers._is_known(builder, kinds)
        assert not triton_launchers._is_known(builder, {**kinds, "d": "tensordesc<fp16[64, 64]>"})
    finally:
        del sys.modules["builder"]
