"""What ``kcoord doctor`` says of a compiler that is installed: a package beside kcoord, which a process of its own imports."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from kcoord.backends import trials
from kcoord.backends.compiler import Compiler
from kcoord.cli import doctor
from tests.support.waiting import eventually

TOY = Compiler("toy", "toy_backend:backend", modules={"toy": "toy_hooks"})
HOOKS = """
from kcoord.backends.reliances import Part

def hook():
    parts = [Part("toy", "toy", "kernels", {":compile": "source"}), Part("toy", "toy", "tuning", {":tune": "source"})]
    assert [part.holds() for part in parts] == [True, False]
"""


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The module `toy`, which doctor's process imports, and nothing else."""
    (tmp_path / "toy-2.dist-info").mkdir()
    (tmp_path / "toy-2.dist-info" / "entry_points.txt").write_text("[kcoord.backends]\ntoy = toy_backend:COMPILER\n")
    (tmp_path / "toy_backend.py").write_text(
        f"from kcoord.backends.compiler import Compiler\nCOMPILER = Compiler('toy', '', modules={dict(TOY.modules)!r})\n"
    )
    (tmp_path / "toy_hooks.py").write_text(HOOKS)
    monkeypatch.setattr(doctor, "compilers", lambda: (TOY, Compiler("none", "", modules={"no_such_module": "none"})))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")]))))
    monkeypatch.setenv("KCOORD_DISABLE", "1")  # of this process alone
    return tmp_path / "toy.py"


def found() -> list[tuple[str, str, str]]:
    return [(each.state, each.what, each.finding) for each in doctor._examined(doctor.compilers())]


def test_a_part_that_is_not_hooked_is_a_warning_with_the_release_and_the_reason(toy: Path) -> None:
    toy.write_text("__version__ = '2.0'\nprint('hello', end='')\ndef compile(source, more=None): pass\n")
    assert found() == [("warn", "toy 2.0", "tuning off: tune differs")]


def test_a_compiler_whose_parts_are_all_hooked_is_no_finding(toy: Path) -> None:
    toy.write_text("def compile(source): pass\ndef tune(source): pass\n")
    toy.with_name("toy_hooks.py").write_text(HOOKS.replace("[True, False]", "[True, True]"))
    assert found() == []


def test_a_namespace_that_other_packages_share_is_no_compiler(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (toy.parent / "shared" / "bindings").mkdir(parents=True)
    monkeypatch.setattr(doctor, "compilers", lambda: (Compiler("tile", "", modules={"shared.tile.compile": "none"}),))
    assert found() == []
    (toy.parent / "shared" / "tile").mkdir()
    (toy.parent / "shared" / "tile" / "__init__.py").touch()
    assert found() == [
        (
            "warn",
            "shared.tile.compile",
            "it cannot be imported: ModuleNotFoundError: No module named 'shared.tile.compile'",
        )
    ]


def test_hooks_that_fail_are_a_warning(toy: Path) -> None:
    toy.touch()
    toy.with_name("toy_hooks.py").write_text("from toy import compile\n")
    ((state, what, finding),) = found()
    assert (state, what) == ("warn", "toy")
    assert finding.startswith("hooks off: ImportError: cannot import name 'compile' from ")


def test_a_compiler_that_cannot_be_imported_is_a_warning_and_the_others_are_looked_at(toy: Path) -> None:
    toy.write_text("raise OSError('no libcuda')\n")
    assert found() == [("warn", "toy", "it cannot be imported: OSError: no libcuda")]


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import os, sys; sys.stderr.write('first\\nno libcuda\\n'); sys.stderr.flush(); os._exit(3)", "no libcuda"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
        ("import time; print('[]'); time.sleep(60)", "it took more than 3 s"),
    ],
    ids=["exit", "kill", "time-out"],
)
def test_a_crash_and_a_time_out_are_a_warning(toy: Path, code: str, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_LONGEST", 3)
    toy.write_text(code)
    assert found() == [("warn", "toy", f"not known: {why}")]


def test_processes_that_a_compiler_started_end_with_its_time(toy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_LONGEST", 3)
    said = toy.with_name("pid")
    toy.write_text(
        "import pathlib, subprocess, time\n"
        f"pathlib.Path({str(said)!r}).write_text(str(subprocess.Popen(['sleep', '60']).pid))\n"
        "time.sleep(60)\n"
    )
    assert found() == [("warn", "toy", "not known: it took more than 3 s")]
    eventually(lambda: not is_running(int(said.read_text())))


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
