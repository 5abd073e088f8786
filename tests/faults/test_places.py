"""The directory of artifacts that nobody named: a home or a temporary directory that is noexec, full, not local or a job's own.

Each job here passes without kcoord, too.
"""

from __future__ import annotations

import contextlib
import errno
import getpass
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.files.faults import store_error
from tests.support.cluster import fill
from tests.support.command import DOCTOR, KCOORD, findings
from tests.support.interpose import find_compiler
from tests.support.mounts import mounted, tmpfs
from tests.support.sandbox import PROGRAMS, Sandbox, eventually

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler: apt install gcc")

_MODULE = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "asked", "", -1, methods};
PyMODINIT_FUNC PyInit_asked(void) { return PyModule_Create(&definition); }
"""
BUILDS = f"""
from triton.runtime.build import compile_module_from_src
print(compile_module_from_src({_MODULE!r}, "asked").answer())
"""
ASKS = """
import sys, kcoord
counts = []
def compile(staging):
    counts.append(1)
    (staging / "kernel").write_text("ours")
coordinator = kcoord.connect()
artifact = coordinator.get_or_compile(kcoord.CacheKey.of("test", "k"), compile, scope=kcoord.Scope.TARGET)
print(len(counts), coordinator.settings.local_dir, coordinator.settings.socket_path, (artifact.path / "kernel").read_text())
"""
KERNELS = f"""
import runpy, sys, kcoord
kcoord.install()
sys.argv = ["rank.py", "--kernels", "2"]
runpy.run_path({str(PROGRAMS / "rank.py")!r}, run_name="__main__")
"""
COMPILES = """
import os, subprocess, sys, kcoord, torch, torch._inductor.config
kcoord.install()
torch._inductor.config.fallback_by_default = True  # no C++ to build
x = torch.ones(8)
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
subprocess.run(sys.argv[1:], stderr=subprocess.DEVNULL)  # the disk fills up
torch.testing.assert_close(torch.compile(lambda x: x.cos() * 2)(x), x.cos() * 2)
print(os.environ["TORCHINDUCTOR_CACHE_DIR"])
"""
_TRITON_ALONE = "of = doctor._examined; doctor._examined = lambda usable: of(c for c in usable if c.name == 'triton')"
ONLY_TMPDIR = "import kcoord.default_dir as d; d._ELSEWHERE = ();"
NOT_LOCAL = "import kcoord.mounts as m; m.LOCAL = m.LOCAL - {'ramfs'};"


@pytest.fixture
def home(sandbox: Sandbox) -> Path:
    """The user's home; no setting names a directory."""
    directory = sandbox.root / "home"
    directory.mkdir()
    for name in ("KCOORD_LOCAL_DIR", "XDG_CACHE_HOME"):
        sandbox.environment.pop(name, None)
    sandbox.environment |= {"HOME": str(directory), "KCOORD_IDLE_TIMEOUT": "20"}
    return directory


@pytest.fixture
def temporary(sandbox: Sandbox, home: Path) -> Path:
    return Path(sandbox.environment["TMPDIR"])


@pytest.fixture
def noexec(temporary: Path) -> Iterator[Path]:
    """The temporary directory, as of Docker's ``--tmpfs /tmp``."""
    with mounted(temporary, "-t", "tmpfs", "-o", "noexec,size=64m,mode=1777", "kcoord-test") as there:
        yield there


@pytest.fixture
def full(temporary: Path) -> Iterator[Path]:
    with tmpfs(temporary, "1m") as there:
        fill(there)
        yield there


def run(
    sandbox: Sandbox, program: str, *arguments: str, before: str = "", launched: bool = True, **more: str
) -> list[str]:
    """The lines of a job that passes."""
    command = [sys.executable, "-c", before + program, *arguments]
    if launched:
        code = f"{before}from kcoord.cli import main; main()"
        done = sandbox.run("-c", code, "exec", "--", *command, timeout=240, **more)
    else:
        done = subprocess.run(command, env=sandbox.env(**more), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return [*done.stdout.splitlines(), *(line for line in done.stderr.splitlines() if "kcoord" in line)]


def compiled_by(lines: list[str]) -> int:
    """The number of kernels that a job of `KERNELS` compiled."""
    (told,) = (json.loads(line) for line in lines if line.startswith("{"))
    return len(told["compiled"])


@pytest.mark.parametrize("launched", [True, False], ids=["launched", "installed"])
def test_a_home_that_stays_keeps_what_a_job_with_a_temporary_directory_of_its_own_compiled(
    sandbox: Sandbox, home: Path, launched: bool
) -> None:
    counts = []
    for job in ("first", "second"):
        own = sandbox.root / job
        own.mkdir()
        compiled, place, socket, _ = run(sandbox, ASKS, launched=launched, TMPDIR=str(own))[0].split()
        counts.append(compiled)
        assert place == str(home / ".cache" / "kcoord")
        assert socket.startswith(f"{own}/"), "containers that share a home have agents of their own"
    assert counts == ["1", "0"]
    assert not list(home.rglob("*.sock*"))


@needs_compiler
def test_a_module_is_built_and_loads_although_nothing_loads_from_the_temporary_directory(
    sandbox: Sandbox, home: Path, noexec: Path
) -> None:
    pytest.importorskip("triton")
    elsewhere = (
        f"import tempfile; tempfile.tempdir = {str(sandbox.root)!r}\n"  # Triton tries what it built before it caches it
    )
    for _ in ("cold", "warm"):
        assert run(sandbox, elsewhere + BUILDS)[0] == "42"
    assert list(home.glob(".cache/kcoord/triton/*/asked*.so"))


def test_kernels_are_compiled_once_although_the_temporary_directory_is_full(
    sandbox: Sandbox, home: Path, full: Path
) -> None:
    """Python, and so Triton, takes the next one for its own temporary files."""
    pytest.importorskip("triton")
    after = sandbox.root / "after"
    after.mkdir()
    both = f"import tempfile; tempfile._candidate_tempdir_list = lambda: {[str(full), str(after)]};"
    lines = [run(sandbox, KERNELS, before=both + ONLY_TMPDIR, launched=False) for _ in ("cold", "warm")]
    counts = list(map(compiled_by, lines))
    assert counts == [2, 0]
    assert len(list(home.glob(".cache/kcoord/triton/*/*.cubin"))) == 2


def test_triton_writes_where_it_would_without_kcoord_while_no_disk_takes_kcoords_files(
    sandbox: Sandbox, home: Path
) -> None:
    pytest.importorskip("triton")
    refused = (
        "import kcoord.rank.directories as s; from pathlib import Path; s.private_places = lambda: [Path('/proc')]\n"
    )
    with mounted(sandbox.root / "disk", "-t", "tmpfs", "-o", "size=1m,mode=0700", "kcoord-test") as disk:
        fill(disk)
        shown = run(sandbox, refused + KERNELS, KCOORD_LOCAL_DIR=str(disk))
        assert compiled_by(shown) == 2
        assert any(f"Triton keeps kernels in {home}/.triton/cache" in line for line in shown), shown
    assert len(list(home.glob(".triton/cache/*/*.cubin"))) == 2


def test_torch_compiles_where_it_would_without_kcoord_once_the_disk_is_full(sandbox: Sandbox) -> None:
    pytest.importorskip("torch")
    with mounted(sandbox.root / "disk", "-t", "tmpfs", "-o", "size=8m,mode=0700", "kcoord-test") as disk:
        shown = run(sandbox, COMPILES, "dd", "if=/dev/zero", f"of={disk}/ballast", KCOORD_LOCAL_DIR=str(disk),
                    TORCHINDUCTOR_VEC_ISA_OK="1")  # fmt: skip
    assert shown[:2] == [f"{disk}/inductor", f"{sandbox.environment['TMPDIR']}/torchinductor_{getpass.getuser()}"]


@needs_compiler
def test_a_job_runs_as_without_kcoord_where_no_place_lets_libraries_be_mapped(
    sandbox: Sandbox, home: Path, noexec: Path
) -> None:
    pytest.importorskip("triton")
    with mounted(home / "cache", "-t", "tmpfs", "-o", "noexec", "kcoord-test") as cache:
        elsewhere = f"import tempfile; tempfile.tempdir = {str(home)!r}\n"
        lines = run(sandbox, elsewhere + BUILDS, before=ONLY_TMPDIR, XDG_CACHE_HOME=str(cache))
        assert lines[0] == "42"
        (told,) = lines[1:]
        assert "it is mounted noexec" in told
        assert told.endswith("the job runs without kcoord")
    assert list(home.glob(".triton/cache/*/asked*.so"))


def test_a_named_directory_from_which_nothing_loads_is_not_used(sandbox: Sandbox, noexec: Path) -> None:
    lines = run(sandbox, "import os; print(os.environ['KCOORD_DISABLE'])", KCOORD_LOCAL_DIR=str(noexec / "named"))
    assert lines[0] == "1"
    assert f"KCOORD_LOCAL_DIR={noexec}/named: it is mounted noexec" in lines[1]


def test_a_home_that_nodes_share_is_no_place_and_the_job_says_what_that_costs(sandbox: Sandbox, home: Path) -> None:
    with mounted(home, "-t", "ramfs", "kcoord-test"):  # stands for NFS
        shown = run(sandbox, ASKS, before=NOT_LOCAL)
        compiled, place = shown[0].split()[:2]
        assert (compiled, Path(place).parent) == ("1", Path(sandbox.environment["TMPDIR"]))
        (costs,) = (line for line in shown if "compiles them again" in line)
        assert f"{home}/.cache/kcoord is on ramfs" in costs
        assert list(home.iterdir()) == []
        assert "compiles them again" not in " ".join(run(sandbox, ASKS, before=NOT_LOCAL)), "it compiled nothing"


def test_a_disk_that_fills_up_or_gets_room_later_moves_nobody(sandbox: Sandbox, home: Path, temporary: Path) -> None:
    """The first process decides, for those of this home and this temporary directory."""
    with mounted(home, "-t", "tmpfs", "-o", "size=80m,mode=0700", "kcoord-test") as disk:
        assert run(sandbox, ASKS, launched=False)[0].split()[1] == str(home / ".cache" / "kcoord")
        ballast = fill(disk)
        compiled, place = run(sandbox, ASKS.replace('"k"', '"other"'), launched=False)[0].split()[:2]
        assert (compiled, place) == ("1", str(home / ".cache" / "kcoord")), "it stands aside, and compiles"
        own = temporary / "own"
        own.mkdir()
        begun = run(sandbox, ASKS, launched=False, TMPDIR=str(own))[0].split()[1]
        assert begun.startswith(f"{own}/"), "a full home is none"
        ballast.unlink()
        assert run(sandbox, ASKS, launched=False, TMPDIR=str(own))[0].split()[1] == begun


def test_processes_that_begin_at_once_choose_one_place(sandbox: Sandbox, home: Path) -> None:
    with mounted(home, "-t", "tmpfs", "-o", "size=80m,mode=0700", "kcoord-test") as disk:
        ranks = [subprocess.Popen([sys.executable, "-c", ASKS], env=sandbox.env(), stdout=subprocess.PIPE, text=True)
                 for _ in range(6)]  # fmt: skip
        word = Path(sandbox.environment["TMPDIR"])
        eventually(lambda: bool(list(word.glob("*/local-dir-*"))))
        fill(disk)
        said = [rank.communicate(timeout=120)[0].split() for rank in ranks]
    assert len({tuple(line[1:3]) for line in said}) == 1, said


def test_a_word_about_a_place_that_is_unsuitable_by_now_is_not_kept(sandbox: Sandbox, home: Path) -> None:
    first = run(sandbox, ASKS, launched=False)[0].split()[1]
    home.chmod(0o777)
    assert first == str(home / ".cache" / "kcoord")
    assert run(sandbox, ASKS, launched=False)[0].split()[1] != first


def test_a_user_without_a_home_has_a_place(sandbox: Sandbox, home: Path, temporary: Path) -> None:
    place = run(sandbox, ASKS, launched=False, HOME="/proc/nowhere")[0].split()[1]
    assert place.startswith(f"{temporary}/")


@pytest.mark.parametrize(("launcher", "trust"), [("exec", "off"), ("torchrun", "require")])
def test_a_node_whose_directory_is_open_to_all_runs_its_part_without_kcoord(
    sandbox: Sandbox, trust: str, launcher: str
) -> None:
    sandbox.local.chmod(0o777)
    script = sandbox.root / "script.py"
    script.write_text("import os; print('it ran', os.environ['KCOORD_DISABLE'])")
    settings = {"KCOORD_TRUST": trust, "KCOORD_SIGNING_KEY": f"ours:{'a' * 64}"}
    if launcher == "exec":
        done = sandbox.run_kcoord(*KCOORD, "exec", "--", sys.executable, script, **settings)
    else:
        pytest.importorskip("torch")
        done = sandbox.run_torchrun("-m", "kcoord_launch.torchrun", "--nproc-per-node=1", script, **settings)
    (told,) = (line for line in done.stderr.splitlines() if line.startswith("kcoord:"))
    assert f"KCOORD_LOCAL_DIR={sandbox.local}" in told
    assert f"everybody may {'write to it' if trust == 'off' else 'replace it'}" in told
    if trust == "require":
        assert (done.returncode, done.stdout) == (2, "")
    else:
        assert (done.returncode, done.stdout) == (0, "it ran 1\n"), done.stderr
        assert told.endswith("the job runs without kcoord")


def test_doctor_finds_that_no_library_loads_from_the_place(sandbox: Sandbox, noexec: Path) -> None:
    triton_alone = DOCTOR[1].replace("doctor._examined = lambda usable: ()", _TRITON_ALONE)
    done = sandbox.run_kcoord("-c", triton_alone, "doctor", "--json", KCOORD_LOCAL_DIR=str(noexec / "named"))
    told = json.loads(done.stdout)["findings"]
    (found,) = (f for f in told if f["state"] == "fail")
    assert "it is mounted noexec" in found["finding"]
    assert {f["state"] for f in told if "trial" in f["finding"]} == {"ok"}, "trials have a place of their own"


def test_doctor_calls_exhausted_inodes_by_their_name(sandbox: Sandbox) -> None:
    with mounted(sandbox.root / "disk", "-t", "tmpfs", "-o", "nr_inodes=64,mode=0700", "kcoord-test") as disk:
        with contextlib.suppress(OSError):
            for number in range(100):
                (disk / str(number)).touch()
        (found,) = (f for f in findings(sandbox, code=1, KCOORD_LOCAL_DIR=str(disk)) if f["state"] == "fail")
        assert "no inodes left" in found["finding"]
        assert "no inodes left" in str(store_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), disk / "any"))


def test_doctor_names_the_place_and_why_it_may_be_the_jobs_alone(sandbox: Sandbox, home: Path) -> None:
    assert any(f["finding"].startswith(f"{home}/.cache/kcoord (") for f in findings(sandbox))
    home.chmod(0o777)
    (found,) = (f for f in findings(sandbox) if "perhaps the job's alone" in f["finding"])
    assert f"{home}/.cache/kcoord: everybody may replace it" in found["finding"]
