"""The node's pool: upcoming keys are compiled before a rank asks for them; and a kernel's launcher, while it is waited for."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from kcoord.artifacts.manifest import Manifest
from kcoord.cgroups import cores
from kcoord.errors import KcoordError
from kcoord.packs.recipe import Recipe
from kcoord.packs.recipe_files import load_profile, save_part
from kcoord.protocol.identity import UNNAMED
from kcoord.protocol.messages import Announce, Granted
from kcoord.protocol.own_socket import OwnSocket
from kcoord.rank.client import AgentClient, Lead
from kcoord.rank.pool_start import PoolStart, Ranks, _environment, has_cores_to_spare
from kcoord.replay.worker import compiled
from kcoord.report.timeline import load_timeline
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord_launch.arguments import early_arguments
from kcoord_launch.pool import packages_of, pool_beside
from tests.support.command import KCOORD, as_json, kcoord
from tests.support.living import words_of
from tests.support.pools import pool_status, start_agent, started, status
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish, sandboxed
from tests.support.triton_ranks import RANK, fork_rank, homes, hooked, report

pytest.importorskip("triton")


@pytest.fixture(scope="module")
def recorded() -> Iterator[tuple[list[Recipe], Manifest]]:
    """A profile of six kernels, and the manifest of the first one that a rank asks for."""
    with sandboxed() as box:
        report(fork_rank(box, "--kernels", "6", **hooked(box, 0, KCOORD_PROFILE="six")))
        report(fork_rank(box, "--kernels", "1", **hooked(box, 0, "one")))
        settings = Settings.from_environ({"KCOORD_LOCAL_DIR": str(box.local)})
        eventually(lambda: list((settings.local_dir / "profiles" / "six").glob("*.recipes")))
        eventually(lambda: len(load_profile(settings, "six")) == 6)
        (first,) = homes(box, "one")
        yield load_profile(settings, "six"), Manifest.decode((first / "kcoord-manifest.msgpack").read_bytes())


@contextmanager
def held(sandbox: Sandbox, first: Manifest, rests: float = 30.0, **agents: str | None) -> Iterator[AgentClient]:
    """Somebody compiles the first kernel, and does not get on."""
    settings = Settings.from_environ(sandbox.env(**agents))
    start_agent(settings, rests)
    home = sandbox.local / "triton" / "held"
    client = AgentClient(settings, Notices())
    lead = client.claim(first.key, home)
    assert isinstance(lead, Lead)
    try:
        yield client
    finally:
        client.give_up(lead, first.key)
        client.close()


def give(sandbox: Sandbox, recipes: list[Recipe]) -> None:
    save_part(sandbox.local / "profiles" / "six", recipes)


def pool(sandbox: Sandbox) -> list[psutil.Process]:
    """The pool's process, and its workers."""
    return [p for p in sandbox.processes() if any("kcoord.replay.process" in word for word in words_of(p))]


def kernels(sandbox: Sandbox) -> list[Path]:
    """Without the launchers that are built where there is a GPU."""
    return [home for home in homes(sandbox) if list(home.glob("*.cubin"))]


def waiting(sandbox: Sandbox) -> int:
    return sum(len(f["waiting"]) for f in status(sandbox)["flights"])


def test_while_ranks_wait_one_pool_compiles_upcoming_keys_beside_them(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    recipes, first = recorded
    give(sandbox, recipes)
    with held(sandbox, first):
        six = ["--kernels", "6"]
        ranks = [fork_rank(sandbox, *six, **hooked(sandbox, n, KCOORD_PROFILE="six")) for n in range(2)]
        eventually(lambda: len(kernels(sandbox)) == 5, 60, "all but the one that is waited for")
        eventually(lambda: waiting(sandbox) == 2, 60)
        eventually(lambda: pool_status(sandbox)["compiled"] == 5)
        # the sixth is in the queue if the pool has looked at it before a rank asked
        idle = re.compile("pool of default: 0 cores busy, [01] keys to compile, 5 compiled ahead, 0 of them used")
        eventually(lambda: idle.search(kcoord(sandbox, "status").stdout))
        processes = pool(sandbox)
        assert len({os.getsid(p.pid) for p in processes}) == 1
        assert {p.nice() for p in processes} == {min(19, os.nice(0) + 10)}
        assert {Path(f"/proc/{p.pid}/oom_score_adj").read_text() for p in processes} == {"900\n"}
    said = [report(rank) for rank in ranks]
    assert [len(s["compiled"]) for s in said] in ([1, 0], [0, 1])
    assert sum(len(s["loaded"]) for s in said) == 11
    eventually(lambda: not pool(sandbox), what="the pool ended with its rank")


def test_on_another_gpu_the_profile_is_compiled_for_that_one(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    recipes, first = recorded
    give(sandbox, [replace(recipe, target="cuda:80") for recipe in recipes])
    with held(sandbox, first):
        rank = fork_rank(sandbox, "--kernels", "6", **hooked(sandbox, 0, KCOORD_PROFILE="six"))
        eventually(lambda: status(sandbox)["pools"], 60)
        eventually(lambda: pool_status(sandbox)["compiled"] == 11, 60, "five for its GPU, and six for the other")
    said = report(rank)
    assert (len(said["compiled"]), len(said["loaded"])) == (1, 5)


def test_where_all_is_there_one_worker_finds_out(sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]) -> None:
    """A warm start would take the memory of as many workers as there are cores."""
    report(fork_rank(sandbox, "--kernels", "6", **hooked(sandbox, 0, KCOORD_PROFILE="off")))
    give(sandbox, recorded[0])
    start_agent(Settings.from_environ(sandbox.env()))
    ours = started(sandbox, [str(PROGRAMS)])
    eventually(lambda: pool_status(sandbox)["loaded"] == 6, 60)
    assert len(pool(sandbox)) == 3, "the process that watches, the one that forks, and its worker"
    ours.close()


def test_a_pool_ends_with_a_rank_that_is_killed(sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]) -> None:
    recipes, first = recorded
    give(sandbox, recipes)
    with held(sandbox, first):
        rank = fork_rank(sandbox, "--kernels", "6", **hooked(sandbox, 0, KCOORD_PROFILE="six"))
        eventually(lambda: len(pool(sandbox)) > 1, 60)
        rank.send_signal(signal.SIGKILL)
        rank.communicate()
        eventually(lambda: not pool(sandbox))


def test_a_pool_ends_with_its_agent(sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]) -> None:
    recipes, first = recorded
    give(sandbox, recipes)
    with held(sandbox, first) as client:
        rank = fork_rank(sandbox, "--kernels", "6", **hooked(sandbox, 0, KCOORD_PROFILE="six"))
        eventually(lambda: len(pool(sandbox)) > 1, 60)
        assert client.stop()
        assert len(report(rank)["compiled"]) <= 6
    eventually(lambda: not pool(sandbox))


def test_a_pool_with_nothing_to_do_ends_and_new_work_starts_another(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    recipes, first = recorded
    give(sandbox, recipes)
    with held(sandbox, first, rests=0.0) as client:
        rank = fork_rank(sandbox, "--kernels", "6", **hooked(sandbox, 0, KCOORD_PROFILE="six"))
        eventually(lambda: len(kernels(sandbox)) == 5, 60)
        eventually(lambda: not pool(sandbox) and not pool_status(sandbox)["running"], 60)
        assert rank.poll() is None
        known, new = recipes[1], replace(recipes[1], target="cuda:80")
        assert client.ask(Announce([known.to_wire()]), Granted) == Granted(granted=False)
        assert client.ask(Announce([new.to_wire()]), Granted) == Granted(granted=True)
    report(rank)


@pytest.mark.parametrize(
    "settings",
    [{"KCOORD_PROFILE": "off"}, {"KCOORD_PROFILE": "six", "KCOORD_POOL_WORKERS": "0"}],
    ids=["no profile", "no workers"],
)
def test_there_is_no_pool_where_none_is_wanted(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest], settings: dict[str, str | None]
) -> None:
    recipes, first = recorded
    give(sandbox, recipes)
    with held(sandbox, first):
        rank = fork_rank(sandbox, "--kernels", "1", **hooked(sandbox, 0, **settings))
        eventually(lambda: waiting(sandbox) == 1, 60)
        assert not pool(sandbox)
    assert len(report(rank)["compiled"]) == 1


RESTORES_SIGPIPE = """
import pathlib, signal, sys
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
sys.path.append(pathlib.Path("an entry that is not text"))
sys.argv[:2] = [sys.argv[1]]
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_first_job_has_no_profile_yet_and_its_pool_ends_by_itself(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    with held(sandbox, recorded[1]):
        rank = sandbox.start("-c", RESTORES_SIGPIPE, RANK, "--kernels", "2", **hooked(sandbox, 0, KCOORD_PROFILE="six"))
        eventually(lambda: waiting(sandbox) == 1, 60)
        eventually(lambda: "default" in status(sandbox)["pools"])
        eventually(lambda: not pool(sandbox), what="it has nothing to do")
    assert len(report(rank)["compiled"]) == 2


@pytest.mark.skipif(not has_cores_to_spare(1), reason="on one core no pool starts before the ranks")
@pytest.mark.parametrize("known", [True, False], ids=["recorded", "first run"])
def test_a_launcher_starts_a_pool_for_the_ranks_if_something_is_known_of_the_job(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest], monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    """A pool that has nothing to do would take the memory of the compilers that it imports."""
    script = sandbox.root / "train.py"
    script.write_text("import triton")
    if known:
        give(sandbox, recorded[0])
    start_agent(Settings.from_environ(sandbox.env()))
    begun: list[tuple[object, ...]] = []

    def note(self: PoolStart, ranks: Ranks) -> socket.socket:
        begun.append((ranks.path[0], ranks.script, ranks.environ["KCOORD_PROFILE"]))
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    monkeypatch.setattr(PoolStart, "_started", note)
    args = early_arguments(["--nproc-per-node", "1", str(script)])
    with pool_beside(args, sandbox.env(KCOORD_PROFILE="six")):
        eventually(lambda: "kcoord-pool" not in {thread.name for thread in threading.enumerate()})
    assert begun == ([(str(sandbox.root), str(script), "six")] if known else [])


@pytest.mark.parametrize(
    ("text", "packages"),
    [
        (
            "import json\ndef f():\n    import triton.language as tl\n    from torch import nn\nfrom . import x\n",
            {"json", "triton", "torch"},
        ),
        ("this is no Python", set()),
    ],
)
def test_a_launcher_reads_the_packages_that_a_script_imports(tmp_path: Path, text: str, packages: set[str]) -> None:
    (tmp_path / "train.py").write_text(text)
    assert packages_of(str(tmp_path / "train.py")) == packages


MODULES = {
    "reads": "import sys\nassert sys.stdin.read() == ''\nopen(f'{__file__}.done', 'w').close()\n",
    "thread": "import threading\nthreading.Thread(target=threading.Event().wait).start()\n",
    "locked": "import os, threading\nos.register_at_fork(after_in_child=threading.Semaphore(0).acquire)\n"
    "threading.Thread(target=threading.Event().wait).start()\n",
    "exits": "raise SystemExit(3)\n",
    "dies": "import os\nos._exit(3)\n",
    "hangs": "import time\nopen('hangs', 'w').close()\ntime.sleep(1000)\n",
}


def test_a_pool_whose_module_hangs_ends_with_its_starter(sandbox: Sandbox) -> None:
    (sandbox.root / "hangs.py").write_text(MODULES["hangs"].replace("'hangs'", f"'{sandbox.root}/hangs'"))
    give(sandbox, [Recipe("triton", "hangs", "f", {}, "cuda:90", 1.0, 0)])
    start_agent(Settings.from_environ(sandbox.env()))
    ours = started(sandbox, [str(sandbox.root)])
    eventually((sandbox.root / "hangs").exists, 60)
    ours.close()
    eventually(lambda: not pool(sandbox))


def test_modules_that_leave_threads_are_imported_once_for_all_workers(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    imports = sandbox.root / "imports"
    threaded = f"open({str(imports)!r}, 'a').write('x')\n{MODULES['thread']}from {recorded[0][0].module} import *\n"
    (sandbox.root / "threaded.py").write_text(threaded)
    give(sandbox, [replace(each, module="threaded") for each in recorded[0]])
    start_agent(Settings.from_environ(sandbox.env()))
    ours = started(sandbox, [str(PROGRAMS), str(sandbox.root)])
    eventually(lambda: pool_status(sandbox)["compiled"] == 6, 60)
    assert imports.read_text() == "x"
    ours.close()


@pytest.mark.parametrize("modules", [["reads", "exits"], ["locked"], ["dies"]], ids="-".join)
def test_a_module_that_misbehaves_costs_its_own_kernels_only(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest], modules: list[str]
) -> None:
    # the others' workers would look stuck where they are given no core for 3 s
    limits = {"stuck": 3.0} if modules == ["locked"] else {}
    for name in modules:
        (sandbox.root / f"{name}.py").write_text(MODULES[name])
    bad = [Recipe("triton", name, "f", {}, "cuda:90", 1.0, number) for number, name in enumerate(modules)]
    give(sandbox, [*bad, *recorded[0]])
    start_agent(Settings.from_environ(sandbox.env()))
    ours = started(sandbox, [str(PROGRAMS), str(sandbox.root)], **limits)
    if modules == ["dies"]:
        eventually(lambda: (s := pool_status(sandbox))["starts"] and not s["running"], 60, "it took the pool with it")
        ours.close()
        ours = started(sandbox, [str(PROGRAMS), str(sandbox.root)], **limits)
    eventually(lambda: len(kernels(sandbox)) == 6, 200, "its workers have a low priority")
    eventually(lambda: pool_status(sandbox)["failed"] == len(modules))
    assert (sandbox.root / "reads.py.done").exists() == ("reads" in modules), "its input was not empty"
    ours.close()
    eventually(lambda: not pool(sandbox))


SLOWLY = """
import os, time
import kcoord
here = os.path.dirname(__file__)

@kcoord.compile_once(scope=kcoord.Scope.TARGET)
def build(width, *, staging, target):
    again = os.path.exists(f"{here}/of-{width}")
    open(f"{here}/of-{width}", "w").close()
    open(f"{here}/began-{os.getpid()}", "w").close()
    while not again and not os.path.exists(f"{here}/go"):
        time.sleep(0.005)
    (staging / "kernel").write_text(str(width))
"""


def slow(sandbox: Sandbox, count: int, **how: float) -> PoolStart:
    """A pool that has begun `count` compiles, of which the first of each key lasts until there is a file ``go``."""
    (sandbox.root / "slowly.py").write_text(SLOWLY)
    calls = [{"args": (width,), "kwargs": {}} for width in range(count)]
    give(sandbox, [Recipe("python", "slowly", "build", call, "cuda:90", 100.0, n) for n, call in enumerate(calls)])
    start_agent(Settings.from_environ(sandbox.env()), **how)
    ours = started(sandbox, [str(sandbox.root)])
    eventually(lambda: list(sandbox.root.glob("began-*")), 60)
    return ours


def test_a_worker_that_is_killed_leaves_its_key_to_a_rank_and_the_rest_to_other_workers(sandbox: Sandbox) -> None:
    ours = slow(sandbox, 3)
    (victim, *_) = sandbox.root.glob("began-*")
    os.kill(int(victim.name.removeprefix("began-")), signal.SIGKILL)
    eventually(lambda: pool_status(sandbox)["failed"] == 1)
    assert "its worker ended" in pool_status(sandbox)["failures"][0]
    (sandbox.root / "go").touch()
    eventually(lambda: pool_status(sandbox)["compiled"] == 2, 60)
    program = (
        "import kcoord, slowly; print(kcoord.warmup([(slowly.build, (n,)) for n in range(3)], targets=['cuda:90']))"
    )
    done = sandbox.run("-c", program, PYTHONPATH=os.pathsep.join([str(sandbox.root), os.environ.get("PYTHONPATH", "")]))
    assert "1 compiled, 2 loaded" in done.stdout, done.stderr
    ours.close()


def test_a_signal_for_the_script_which_slurm_sends_to_all_ends_no_worker(sandbox: Sandbox) -> None:
    ours = slow(sandbox, 2)
    for process in pool(sandbox):
        process.send_signal(signal.SIGUSR1)
        process.send_signal(signal.SIGUSR2)
    (sandbox.root / "go").touch()
    eventually(lambda: pool_status(sandbox)["compiled"] == 2, 60)
    assert pool_status(sandbox)["failed"] == 0
    ours.close()


def test_a_rank_that_waits_for_a_worker_that_gets_no_core_compiles_too(sandbox: Sandbox) -> None:
    ours = slow(sandbox, 1, starved=0.1)
    program = "import kcoord, slowly; print(kcoord.warmup([(slowly.build, (0,))], targets=['cuda:90']))"
    path = os.pathsep.join([str(sandbox.root), os.environ.get("PYTHONPATH", "")])
    done = sandbox.run("-c", program, PYTHONPATH=path)
    assert "1 compiled" in done.stdout, done.stderr
    assert pool_status(sandbox)["busy"] == ["slowly.build"]
    (sandbox.root / "go").touch()
    ours.close()


def test_the_workers_of_a_pool_whose_process_is_killed_end_at_once(sandbox: Sandbox) -> None:
    ours = slow(sandbox, 2)
    processes = {p.pid: p for p in pool(sandbox)}
    (parent,) = [p for p in processes.values() if p.ppid() not in processes]
    parent.kill()
    eventually(lambda: not pool(sandbox), what="though their compiles last")
    eventually(lambda: not pool_status(sandbox)["running"])
    ours.close()


def test_a_worker_that_has_grown_makes_room_for_another(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    give(sandbox, recorded[0])
    start_agent(Settings.from_environ(sandbox.env()))
    ours = started(sandbox, [str(PROGRAMS)], grown=-1 << 40)
    eventually(lambda: pool_status(sandbox)["compiled"] == 6, 60)
    assert pool_status(sandbox)["failed"] == 0
    ours.close()


def test_what_cannot_be_compiled_here_is_said() -> None:
    assert compiled({}) == ("failed", "ValueError: a recipe's fields are wrong")
    recipe = Recipe("triton", "nowhere", "f", {}, "cuda:90", 1.0, 0)
    assert compiled(recipe.to_wire())[1].startswith("nowhere.f for cuda:90: ModuleNotFoundError")
    other = Recipe("nobody", "nowhere", "f", {}, "cuda:90", 1.0, 0)
    assert compiled(other.to_wire()) == (
        "failed",
        "nowhere.f for cuda:90: KcoordError: no compiler here has recipes of the kind 'nobody'",
    )


def a_start(tmp_path: Path) -> PoolStart:
    settings = Settings.from_environ({"KCOORD_PROFILE": "six", "KCOORD_LOCAL_DIR": str(tmp_path), "KCOORD_SPAWN": "0"})
    return PoolStart(settings, Notices(), AgentClient(settings, Notices()))


def test_a_forked_child_neither_holds_nor_ends_its_parents_pool(tmp_path: Path) -> None:
    start = a_start(tmp_path)
    ours, theirs = socket.socketpair()
    with theirs:
        reads = [sys.executable, "-c", "import sys; sys.stdin.read()"]
        sleeper = subprocess.Popen(reads, stdin=theirs.fileno())
    start._control = OwnSocket(ours)
    pipe = start._control.fileno()
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            start.close()
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
    start.close()
    assert sleeper.wait(20) == 0
    os.close(reading)
    os.close(writing)


def test_a_pool_whose_control_the_script_closed_costs_nothing_that_has_its_number_now(tmp_path: Path) -> None:
    start = a_start(tmp_path)
    ours, theirs = socket.socketpair()
    start._control = OwnSocket(ours)
    number = start._control.fileno()
    os.close(number)
    mine, other = socket.socketpair()
    with theirs, mine, other:
        assert number in (mine.fileno(), other.fileno())
        start.close()
        for end in (mine, other):
            end.send(b"x")
        assert [end.recv(100, socket.MSG_DONTWAIT) for end in (mine, other)] == [b"x", b"x"]


@pytest.mark.parametrize("executable", ["no python", "", None])
def test_a_pool_that_cannot_start_is_told_once_and_the_rank_waits_on(
    executable: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", executable and str(tmp_path / executable))
    start = a_start(tmp_path)
    monkeypatch.setattr(start._client, "ask", lambda *asked, **how: Granted(granted=True))
    for _ in range(2):
        start.start()
    assert caplog.text.count("nothing is compiled ahead") == 1


WAITS_FOR_ALL = """
import os, sys
from kcoord.rank.client import AgentClient
from kcoord.rank.pool_start import PoolStart
from kcoord.report.timeline import load_timeline
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
settings = Settings.from_environ()
sys.path.insert(0, {programs!r})
PoolStart(settings, Notices(), AgentClient(settings, Notices())).start()
print("started", flush=True)
input()
try:
    while True:
        os.wait()
except ChildProcessError:
    print("no children")
"""


def test_a_script_that_waits_for_all_its_children_does_not_wait_for_the_pool(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    give(sandbox, recorded[0])
    start_agent(Settings.from_environ(sandbox.env()))
    environment = sandbox.env(**hooked(sandbox, 0, KCOORD_PROFILE="six"))
    program = WAITS_FOR_ALL.format(programs=str(PROGRAMS))
    rank = subprocess.Popen(
        [sys.executable, "-c", program], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdout is not None
    assert rank.stdout.readline() == "started\n"
    eventually(lambda: pool(sandbox), 60)
    out, _ = rank.communicate("\n", timeout=60)
    assert out == "no children\n"
    eventually(lambda: not pool(sandbox))


def test_a_pool_joins_nothing_that_its_rank_is_in_and_has_the_ranks_settings(tmp_path: Path) -> None:
    settings = Settings.from_environ({"KCOORD_PROFILE": "six"}, local_dir=str(tmp_path), spawn="0", max_wait="7")
    rank = {"RANK": "3", "MASTER_ADDR": "node", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "x", "PMIX_RANK": "3",
            "OMPI_COMM_WORLD_RANK": "3", "PATH": "/bin", "KCOORD_PROFILE": "six"}  # fmt: skip
    found = _environment(settings, rank)
    assert not {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"} & found.keys()
    assert (found["RANK"], found["PATH"], found["CUDA_VISIBLE_DEVICES"]) == ("3", "/bin", "")
    again = Settings.from_environ(found)
    assert (again.local_dir, again.spawn, again.max_wait) == (tmp_path, False, 7.0)
    assert (again.recorded_as, again.pool_workers) == (None, 0)


TORCHRUN_ON_MANY_CORES = """
import sys
import threading
from kcoord.rank import pool_start
pool_start._ENOUGH_CORES = 1
from kcoord_launch.torchrun import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(not has_cores_to_spare(1), reason="on one core no pool starts before the ranks")
@pytest.mark.parametrize("profile", ["six", "mine"], ids=["its own profile", "what others compiled of its imports"])
def test_with_torchrun_the_pool_begins_before_the_ranks_and_holds_no_script_up(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest], profile: str
) -> None:
    give(sandbox, recorded[0])
    start_agent(Settings.from_environ(sandbox.env()))
    gate = sandbox.root / "gate"
    command = ["-c", TORCHRUN_ON_MANY_CORES, "--kcoord-profile", profile, "--kcoord-job", "tr", "--nproc-per-node", "1"]
    python_path = os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")])
    rank = (RANK, "--kernels", "6", "--gate", gate)
    job = sandbox.fork_torchrun(*command, *rank, PYTHONPATH=python_path, OMP_NUM_THREADS="1")
    eventually(lambda: len(kernels(sandbox)) == 6, 120)
    eventually(lambda: list(sandbox.root.glob("gate.*")), 120, "the script has begun, though nobody needs a kernel")
    gate.touch()
    said = report(job)
    assert (len(said["compiled"]), len(said["loaded"])) == (0, 6)
    assert "6 kernels: 6 compiled, 6 loaded" in said["stderr"]
    figures = as_json(sandbox, "stats", "--job", "tr")
    assert (figures["ahead"], figures["ahead_used"]) == (6, 6)

    def is_reported() -> bool:
        done = sandbox.run_kcoord(*KCOORD, "report", "--json", "-o", str(sandbox.root / "page.html"), "tr")
        found = json.loads(done.stdout) if done.returncode == 0 else {}
        return [found.get(name) for name in ("ranks", "compiles", "ahead", "ahead_used")] == [1, 6, 6, 6]

    eventually(is_reported, what="the agent writes once a second")
    eventually(lambda: not pool(sandbox))


ON_MANY_CORES = """
import runpy, sys
from kcoord.rank import pool_start
pool_start._ENOUGH_CORES = 1
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_configurations_that_a_rank_is_about_to_measure_are_compiled_at_once(sandbox: Sandbox) -> None:
    start_agent(Settings.from_environ(sandbox.env()))
    gate = sandbox.root / "gate"
    rank = sandbox.start(
        "-c", ON_MANY_CORES, PROGRAMS / "tuned.py", GATE=str(gate), **hooked(sandbox, 0, KCOORD_PROFILE="off")
    )
    eventually(lambda: list(sandbox.root.glob("gate.*")), 60, "it measures its first configuration")
    eventually(lambda: len(kernels(sandbox)) == 3, 60)
    eventually(lambda: pool_status(sandbox)["compiled"] == 3)
    gate.touch()
    done = finish(rank)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["choice"], len(said["measured"]), said["pruned"]) == (64, 3, [7])
    assert len(kernels(sandbox)) == 3


def test_a_job_that_nobody_gave_a_profile_finds_what_it_compiled_before(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    rank = ["--kernels", "6"]
    report(fork_rank(sandbox, *rank, **hooked(sandbox, 0, KCOORD_PROFILE=None, KCOORD_IDLE_TIMEOUT="0.1")))
    (profile,) = eventually_one(sandbox.local / "profiles")
    assert profile.name.startswith("auto-rank.1.")
    shutil.rmtree(sandbox.local / "triton")
    eventually(lambda: not sandbox.processes(), what="its agent ended")
    with held(sandbox, recorded[1]):
        again = fork_rank(sandbox, *rank, **hooked(sandbox, 0, KCOORD_PROFILE=None))
        eventually(lambda: len(kernels(sandbox)) == 5, 60, "all but the one that is waited for")
    assert len(report(again)["compiled"]) == 1


def test_a_warm_rank_writes_no_profile_that_nobody_named(sandbox: Sandbox) -> None:
    def profiles(name: str | None) -> list[str]:
        report(
            fork_rank(sandbox, "--kernels", "2", **hooked(sandbox, 0, KCOORD_PROFILE=name, KCOORD_IDLE_TIMEOUT="0.1"))
        )
        eventually(lambda: not sandbox.processes(), what="its agent has written what it had, and ended")
        directory = sandbox.local / "profiles"
        found = [each.name for each in directory.iterdir()] if directory.is_dir() else []
        shutil.rmtree(directory, ignore_errors=True)
        return found

    (cold,) = profiles(None)
    assert cold.startswith("auto-rank.")
    assert profiles(None) == []
    assert profiles("mine") == ["mine"]


def test_the_first_run_of_a_job_is_helped_by_what_others_compiled_of_its_modules(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest]
) -> None:
    recipes, first = recorded
    elsewhere = [replace(recipes[0], module="not_imported"), replace(recipes[0], target="cuda:80")]
    give(sandbox, [*recipes, *elsewhere])
    with held(sandbox, first):
        rank = sandbox.start("-c", ON_MANY_CORES, RANK, "--kernels", "4", **hooked(sandbox, 0, KCOORD_PROFILE="mine"))
        eventually(lambda: len(kernels(sandbox)) == 5, 60, "all but the one that is waited for")
    assert len(report(rank)["compiled"]) == 1
    eventually(lambda: pool_status(sandbox)["used"] == 3)
    assert pool_status(sandbox)["guessed"] == 6


def eventually_one(directory: Path) -> list[Path]:
    eventually(lambda: directory.is_dir() and len(list(directory.iterdir())) == 1)
    return list(directory.iterdir())


@pytest.mark.skipif(cores() < 2, reason="the caller leaves no core to a pool")
@pytest.mark.parametrize("workers", [None, "0"])
def test_a_warm_up_starts_the_pool_also_where_it_is_off_and_needs_none(
    sandbox: Sandbox, recorded: tuple[list[Recipe], Manifest], workers: str | None
) -> None:
    recipes, first = recorded
    give(sandbox, recipes)
    settings = hooked(sandbox, 0, KCOORD_PROFILE="off", KCOORD_POOL_WORKERS=workers)
    program = (
        f"import sys; sys.path.insert(0, {str(PROGRAMS)!r}); import kcoord; print(kcoord.warmup('six', progress=False))"
    )
    with held(sandbox, first, KCOORD_POOL_WORKERS=workers):
        rank = sandbox.start("-c", program, **settings)
        eventually(lambda: waiting(sandbox) >= 1, 60, "all is compiled but what is held")
        eventually(lambda: pool(sandbox), 60)
    out, err = rank.communicate(timeout=60)
    assert (rank.returncode, out[:10]) == (0, "6 compiled"), err


# Launchers.

LAUNCHER = """
import glob, os, sys, types
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
built = len(glob.glob(os.environ["KCOORD_LOCAL_DIR"] + "/triton/*/launcher*.so"))
print(built, Launcher(kernel.src, types.SimpleNamespace(tensordesc_meta=None)).file)
"""


def launchers(sandbox: Sandbox) -> list[Path]:
    return sorted((sandbox.local / "triton").glob("*/launcher*.so"))


def builds(sandbox: Sandbox) -> int:
    """The number of launchers that ranks have built."""
    try:
        found = load_timeline(Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local)}), UNNAMED)
    except KcoordError:  # the agent writes once a second
        return 0
    return sum(span.compiled and span.name.startswith("launcher") for _, span in found.spans())


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
    before, path = out.split()
    assert before == "1", "before it was asked for"
    eventually(lambda: builds(sandbox) == 1, what="it was built once")
    assert Path(path) == launchers(sandbox)[0]


REPLAYED = """
from kcoord.backends.triton import launchers
launchers._DEVICES["cuda"] = (os.devnull,)
triton.backends.backends["nvidia"] = types.SimpleNamespace(driver=types.SimpleNamespace(__module__="__main__"))
CudaLauncher = Launcher
launchers.build(kernel.src, kernels.SM90, waits=sys.argv[1] == "waits")
print(len(glob.glob(os.environ["KCOORD_LOCAL_DIR"] + "/triton/*/launcher*.so")))
"""


def test_a_replay_that_waits_for_kernels_waits_for_their_launchers(sandbox: Sandbox) -> None:
    """Else a warm-up ends, and with it its container, before the pool has built them."""
    programs = LAUNCHER.format(programs=str(PROGRAMS))
    with sandboxed() as other:
        done = other.run("-c", programs, **hooked(other, 0))
        assert done.returncode == 0, done.stderr
        (launcher,) = launchers(other)
        manifest = Manifest.decode((launcher.parent / "kcoord-manifest.msgpack").read_bytes())
    program = programs.rpartition("built = ")[0] + REPLAYED
    with held(sandbox, manifest):
        done = sandbox.run("-c", program, "passes on", **hooked(sandbox, 0))
        assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
        rank = sandbox.start("-c", program, "waits", **hooked(sandbox, 0))
        eventually(lambda: waiting(sandbox) == 1, 60)
    out, err = rank.communicate(timeout=60)
    assert (rank.returncode, out) == (0, "1\n"), err


def test_a_rank_that_waits_for_nobody_builds_no_launcher_ahead(sandbox: Sandbox) -> None:
    patient = "import kcoord.rank.client as c\nc._AT_ONCE = 60\n"  # a busy machine answers late
    program = patient + LAUNCHER.format(programs=str(PROGRAMS))
    done = sandbox.run("-c", program, **hooked(sandbox, 0))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == "0"
    eventually(lambda: builds(sandbox) == 1)


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
        triton_launchers.build(source, SimpleNamespace(backend="cuda", warp_size=32), waits=False)
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
