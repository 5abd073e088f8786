"""Toolchains as they are recorded, and the stubs that stand for their compilers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from kcoord.keys import CacheKey
from kcoord.keys.tools import commands, record
from kcoord.keys.tools.record import Toolchain, write_stubs
from kcoord.keys.tools.toolchain import borrowed_in, tool_factors, toolchain_here, tools

COMPILER = """#!/bin/sh
case "$*" in
  *-M*) printf 'k.o: k.cpp number.h %s\\n' {own} ;;
  -dumpversion) echo 12.2 ;;
  --version) echo "g++ (ours) 12.2.0" ;;
  *) exit 1 ;;
esac
"""


class Machines:
    """A builder, whose g++ is in a prefix of its own, and a consumer, which has a stub in its place."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.local, self.work, self._monkeypatch = root / "local", root / "work", monkeypatch
        self.own, compiler = root / "prefix" / "include" / "own.h", root / "prefix" / "bin" / "g++"
        for directory in (self.own.parent, compiler.parent, self.work):
            directory.mkdir(parents=True)
        self.own.write_text("#define OWN 1\n")
        compiler.write_text(COMPILER.format(own=self.own))
        compiler.chmod(0o755)
        (self.work / "k.cpp").write_text('#include "number.h"\n')
        (self.work / "number.h").write_text("#define NUMBER 1\n")
        (self.work / "other.h").touch()  # the directory stays one with headers
        self.lists: dict[tuple[str, ...], bytes] = {}
        monkeypatch.setenv("PATH", str(compiler.parent))
        self.compiler, self.stubs = compiler, root / "stubs"
        self.toolchain = toolchain_here(self.local).asked()
        self.found = tools(["g++"], self.local)

    def borrow(self) -> Path:
        """The compiler and its headers go; the stub that is there now."""
        self.stubs.mkdir(mode=0o755)
        self.compiler.unlink()
        self.own.unlink()
        write_stubs(self.stubs, Toolchain.decode(self.toolchain.encode(), self.toolchain.key.digest), ["C++"])
        self._monkeypatch.setenv("PATH", str(self.stubs))
        return self.stubs / "g++"

    def get(self, compiler: str, asked: Sequence[str]) -> bytes | None:
        return self.lists.get(tuple(asked))

    def offer(self, compiler: str, asked: Sequence[str], content: bytes) -> None:
        self.lists[tuple(asked)] = content

    def files(self, local: str) -> tuple[str, ...]:
        command = ("g++", "-c", "k.cpp")
        return commands.inputs_of([command], ["k.cpp"], self.work, self.work.parent / local, lists=self).files


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machines:
    return Machines(tmp_path, monkeypatch)


def test_a_stub_has_the_identity_of_its_compiler_under_any_label_and_is_known_as_borrowed(machines: Machines) -> None:
    real = tool_factors(machines.found)
    stub = str(machines.borrow())
    assert tool_factors(tools([stub], machines.local)) == real
    assert {label.partition("/")[0] for label in tools({"host": stub}, machines.local)} == {"host"}
    assert borrowed_in(CacheKey.of("x", "k", **tool_factors(tools([stub], machines.local)))) == "g++"
    assert borrowed_in(CacheKey.of("x", "k", tools={})) == ""


@pytest.mark.parametrize("open_to_all", ["file", "directory"])
def test_a_stub_that_others_may_write_is_not_believed(machines: Machines, open_to_all: str) -> None:
    stub = machines.borrow()
    (stub if open_to_all == "file" else stub.parent).chmod(0o777)
    assert record.read(str(stub)) is None
    assert tools([stub], machines.local) != machines.found


def test_a_stub_gives_recorded_answers_and_compiles_nothing(machines: Machines) -> None:
    stub = str(machines.borrow())
    asked = subprocess.run([stub, "--version"], capture_output=True, text=True)
    assert (asked.returncode, asked.stdout) == (0, "g++ (ours) 12.2.0\n")
    done = subprocess.run([stub, "-c", "k.cpp"], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (127, 1)
    assert "g++ is borrowed" in done.stderr
    assert machines.toolchain.releases["g++"] == "12.2.0"


def test_headers_that_came_with_the_compiler_may_be_missing_and_others_may_not(machines: Machines) -> None:
    made = machines.files("builder")
    machines.borrow()
    assert machines.files("consumer") == made
    number = machines.work / "number.h"
    number.write_text("#define NUMBER 2\n")
    assert machines.files("consumer") != made
    number.unlink()
    with pytest.raises(ValueError, match=r"number\.h is missing"):
        machines.files("consumer")
    machines.lists.clear()
    with pytest.raises(ValueError, match="is borrowed"):
        machines.files("consumer")


@pytest.mark.parametrize(
    "change",
    [{"tools": {"../g++": {}}}, {"tools": []}, {"answers": {"g++": {}}}, {"answers": {}}, {"system": 1}, {"more": 1}],
)
def test_a_record_that_is_malformed_or_anothers_is_refused(machines: Machines, change: dict[str, object]) -> None:
    document = json.loads(machines.toolchain.encode())
    with pytest.raises(ValueError, match=r"toolchain|compiler"):
        Toolchain.decode(json.dumps({**document, **change}).encode(), machines.toolchain.key.digest)
