"""``kcoord cc`` as builds use it."""

from __future__ import annotations

import json
import shlex
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kcoord.artifacts.catalog import local_manifests
from tests.support import living
from tests.support.command import KCOORD
from tests.support.sandbox import Sandbox, eventually, finish

SOURCE = '#include <cstddef>\n#include "one.h"\nint f() { return ONE; }\n'


@pytest.fixture
def source(sandbox: Sandbox) -> Path:
    path = sandbox.root / "one.cpp"
    path.write_text(SOURCE)
    path.with_name("one.h").write_text("#define ONE 1\n")
    return path


def cc(sandbox: Sandbox, *line: object, **more: str) -> subprocess.CompletedProcess[str]:
    done = sandbox.run(*KCOORD, "cc", "--", *map(str, line), **more)
    assert "please report it" not in done.stderr
    return done


def shared(sandbox: Sandbox) -> int:
    return len(list(local_manifests(sandbox.local)))


def test_outputs_of_a_hit_are_those_of_the_compiler(sandbox: Sandbox, source: Path) -> None:
    """The object, the rule for make and the permissions."""
    line = ("g++", "-c", source.name, "-MD", "-MP")
    subprocess.run([*line, "-o", "stock.o"], cwd=sandbox.root, check=True)
    for name in ("first", "second"):
        assert cc(sandbox, *line, "-o", f"{name}.o").returncode == 0
    assert shared(sandbox) == 1
    stock = sandbox.root / "stock.o"
    for name in ("first", "second"):
        mine = stock.with_name(f"{name}.o")
        assert mine.read_bytes() == stock.read_bytes()
        assert stat.S_IMODE(mine.stat().st_mode) == stat.S_IMODE(stock.stat().st_mode)
        assert rules(mine.with_suffix(".d")) == {
            target.replace("stock.o", mine.name): needed for target, needed in rules(stock.with_suffix(".d")).items()
        }


def rules(path: Path) -> dict[str, set[str]]:
    """What each target of a makefile needs. Paths are resolved: compilers name headers as they find them."""
    lines = path.read_text().replace("\\\n", " ").splitlines()
    found = dict(line.split(":", 1) for line in lines if line.strip())
    place = path.parent
    return {
        target.strip() if target.strip().endswith(".o") else str((place / target.strip()).resolve()): {
            str((place / each).resolve()) for each in needed.split()
        }
        for target, needed in found.items()
    }


def test_ranks_with_directories_of_their_own_run_one_compiler(sandbox: Sandbox) -> None:
    """DeepGEMM#301: each rank compiles each kernel, in a directory of its own. The launcher is a script, as it wants a path."""
    real, launcher = sandbox.root / "real", sandbox.root / "nvcc"
    real.write_text('#!/bin/sh\ncase "$*" in *" -M") ;; *) echo >> "$0.log" ;; esac\nexec g++ "$@"\n')
    launcher.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, *map(str, KCOORD)])} cc -- {real} "$@"\n')
    for script in (real, launcher):
        script.chmod(0o755)
    outputs = []
    for rank in range(4):
        place = sandbox.root / f"rank{rank}"
        place.mkdir()
        (place / "kernel.cpp").write_text("int kernel() { return 1; }\n")
        outputs.append(place / "kernel.o")
        command = [launcher, "-c", place / "kernel.cpp", "-o", outputs[-1]]
        subprocess.run(command, env=sandbox.env(), check=True, timeout=60)
    assert len({output.read_bytes() for output in outputs}) == 1
    assert real.with_name("real.log").read_text() == "\n"


def test_a_refused_compile_has_the_compilers_status_and_messages(sandbox: Sandbox, source: Path) -> None:
    source.write_text("int f() { return no_such_name; }\n")
    stock = subprocess.run(["g++", "-c", source.name], cwd=sandbox.root, capture_output=True, text=True)
    done = cc(sandbox, "g++", "-c", source.name)
    assert (done.returncode, done.stderr) == (stock.returncode, stock.stderr)
    assert shared(sandbox) == 0


def test_warnings_are_told_again_by_a_hit(sandbox: Sandbox, source: Path) -> None:
    source.write_text("int f() { int unused; return 1; }\n")
    first, second = (cc(sandbox, "g++", "-Wall", "-c", source.name, "-o", f"{n}.o") for n in range(2))
    assert "unused variable" in first.stderr
    assert second.stderr == first.stderr
    assert shared(sandbox) == 1


@pytest.mark.parametrize("line", ["g++ --version", "g++ -E one.cpp", "g++ -shared -fPIC one.cpp -o one.so"])
def test_other_commands_run_as_they_are(sandbox: Sandbox, source: Path, line: str) -> None:
    stock = subprocess.run(line.split(), cwd=sandbox.root, capture_output=True, text=True)
    done = cc(sandbox, *line.split())
    assert (done.returncode, done.stdout, done.stderr) == (stock.returncode, stock.stdout, stock.stderr)
    assert shared(sandbox) == 0


def test_an_output_that_holds_the_time_is_not_shared(sandbox: Sandbox, source: Path) -> None:
    source.with_name("one.h").write_text("#define ONE sizeof(__TIME__)\n")
    assert cc(sandbox, "g++", "-c", source.name).returncode == 0
    assert (sandbox.root / "one.o").exists()
    assert shared(sandbox) == 0


def test_debug_information_keeps_directories_apart(sandbox: Sandbox, source: Path) -> None:
    other = sandbox.root / "other"
    other.mkdir()
    for name in ("one.cpp", "one.h"):
        (other / name).write_bytes((sandbox.root / name).read_bytes())
    for place in (sandbox.root, other):
        assert cc(sandbox, "g++", "-g", "-c", place / "one.cpp", "-o", place / "one.o").returncode == 0
    assert shared(sandbox) == 2


def test_a_launcher_that_is_told_to_end_ends_its_compiler(sandbox: Sandbox, source: Path) -> None:
    compiler, began = sandbox.root / "slow", sandbox.root / "began"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -M") exec g++ "$@" ;; esac\ntouch {began}\nexec sleep 600\n')
    compiler.chmod(0o755)
    launcher = sandbox.start(*KCOORD, "cc", "--", compiler, "-c", source.name)
    eventually(began.exists)
    launcher.terminate()
    assert finish(launcher).returncode == 128 + signal.SIGTERM
    assert not [each for each in sandbox.processes() if "sleep" in living.words_of(each)]


TOLD_AS_IT_STARTS = """
import os, signal, subprocess
native = subprocess.Popen._execute_child
def execute(process, args, *rest):
    native(process, args, *rest)
    if "-o" in args:
        os.kill(os.getpid(), signal.SIGTERM)
subprocess.Popen._execute_child = execute
from kcoord.cli import main
main()
"""


def test_a_launcher_that_is_told_to_end_as_its_compiler_starts_ends_it(sandbox: Sandbox, source: Path) -> None:
    compiler = sandbox.root / "slow"
    compiler.write_text('#!/bin/sh\ncase "$*" in *" -M") exec g++ "$@" ;; esac\nexec sleep 600\n')
    compiler.chmod(0o755)
    launcher = sandbox.start("-c", TOLD_AS_IT_STARTS, "cc", "--", compiler, "-c", source.name)
    assert finish(launcher).returncode == 128 + signal.SIGTERM
    assert not [each for each in sandbox.processes() if {"sleep", str(compiler)} & {*living.words_of(each)}]


def test_a_refused_compile_leaves_no_output(sandbox: Sandbox, source: Path) -> None:
    output = sandbox.root / "one.o"
    output.write_text("of an earlier compile")
    source.write_text("int f() { return no_such_name; }\n")
    assert cc(sandbox, "g++", "-c", source.name).returncode == 1
    assert not output.exists()


def test_an_output_that_cannot_be_written_is_named_by_the_compiler(sandbox: Sandbox, source: Path) -> None:
    for _ in range(2):
        done = cc(sandbox, "g++", "-c", source.name, "-o", "no-such-directory/one.o")
        assert (done.returncode, "no-such-directory/one.o" in done.stderr) == (1, True)


def test_a_missing_compiler_is_named(sandbox: Sandbox) -> None:
    done = cc(sandbox, "no-such-compiler", "-c", "one.cpp")
    assert (done.returncode, done.stderr) == (
        127,
        "kcoord: no-such-compiler: no such program; put the compiler after --\n",
    )


def test_without_kcoord_the_compiler_runs(sandbox: Sandbox, source: Path) -> None:
    assert cc(sandbox, "g++", "-c", source.name, KCOORD_DISABLE="1").returncode == 0
    assert (sandbox.root / "one.o").exists()
    assert sandbox.is_untouched


def test_statistics_name_it(sandbox: Sandbox, source: Path) -> None:
    cc(sandbox, "g++", "-c", source.name)
    listed = json.loads(sandbox.run_kcoord(*KCOORD, "ls", "--json").stdout)
    assert json.dumps(listed).count('"cc"') == 1
