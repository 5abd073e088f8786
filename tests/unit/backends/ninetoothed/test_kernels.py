"""NineToothed's kernels: what jobs share, and what they do not."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts.catalog import local_manifests
from tests.support.command import KCOORD
from tests.support.sandbox import PROGRAMS, Sandbox, finish
from tests.unit.backends.ninetoothed import machine

pytestmark = pytest.mark.skipif(bool(machine.why_not()), reason=machine.why_not() or "-")

KERNELS = PROGRAMS / "ninetoothed_kernels.py"


@pytest.fixture
def box(sandbox: Sandbox) -> Sandbox:
    """A sandbox whose machine has a stand-in for a GPU."""
    sandbox.environment |= machine.make(sandbox.root)
    return sandbox


def run(box: Sandbox, mode: str, **more: str) -> dict[str, Any]:
    return outcome(box.run(KERNELS, mode, **more))


def outcome(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {**found, "said": done.stderr}


def libraries(box: Sandbox) -> list[Path]:
    """The artifacts of libraries."""
    return [manifest.parent for manifest in local_manifests(box.local) if (manifest.parent / "copy.so").exists()]


# ``make`` for Triton.


def test_processes_with_other_homes_hash_seeds_and_earlier_tensors_compile_a_kernel_once(box: Sandbox) -> None:
    homes = [box.root / f"home{n}" for n in range(4)]
    for home in homes:
        home.mkdir()
    started = [
        box.start(KERNELS, "make", PYTHONHASHSEED=str(n), EARLIER=str(5 * n), HOME=str(home))
        for n, home in enumerate(homes)
    ]
    found = [outcome(finish(process)) for process in started]
    assert len({tuple(each["sources"]) for each in found}) == 1
    assert sum(each["compiles"] for each in found) == 1


def test_a_source_that_a_killed_rank_left_torn_is_written_again(box: Sandbox) -> None:
    sources = run(box, "make", PYTHONHASHSEED="1")["sources"]
    before = {file: file.read_bytes() for file in (box.root / ".ninetoothed").glob("*.py")}
    for file, content in before.items():
        file.write_bytes(content[: len(content) // 2])
    assert run(box, "make", PYTHONHASHSEED="1")["sources"] == sources
    assert {file: file.read_bytes() for file in before} == before


def test_a_launched_script_is_hooked_though_ninetoothed_imports_triton_first(box: Sandbox) -> None:
    launch = (*KCOORD, "exec", "--", sys.executable, str(KERNELS), "launched")
    first = outcome(box.run(*launch, PYTHONHASHSEED="1"))
    again = outcome(box.run(*launch, PYTHONHASHSEED="2", EARLIER="9"))
    assert (first["compiles"], again["compiles"], again["sources"]) == (1, 0, first["sources"])


# Libraries.


def test_a_key_sees_each_input_and_is_the_same_in_every_process(box: Sandbox) -> None:
    one = run(box, "keys", PYTHONHASHSEED="1")["keys"]
    two = run(box, "keys", PYTHONHASHSEED="2", EARLIER="7", OUTPUT="elsewhere")["keys"]
    assert len(set(one.values())) == len(one) == 21
    assert one == two


def test_processes_that_race_for_one_directory_build_its_library_once(box: Sandbox) -> None:
    started = [box.start(KERNELS, "build", PYTHONHASHSEED=str(n)) for n in range(4)]
    assert sum(outcome(finish(process, 240))["compiles"] for process in started) == 1


def test_a_library_is_found_from_another_directory(box: Sandbox) -> None:
    first, second = run(box, "build"), run(box, "build", OUTPUT="elsewhere")
    assert (first["compiles"], second["compiles"], second["files"]) == (1, 0, first["files"])


def test_the_directory_that_the_user_names_has_the_library_and_its_sources(box: Sandbox) -> None:
    first = run(box, "build")
    assert {"copy.so", "copy.h", "copy.cpp", "copy_16_4_2.h", "copy_16_4_2.cpp"} <= set(first["files"])
    output = box.root / "out"
    before = {name: (output / name).read_bytes() for name in first["files"]}
    assert f'#include "{box.root}/.ninetoothed/ninetoothed.h"'.encode() in before["copy.h"]
    for name in first["files"]:
        (output / name).unlink()
    (output / "copy.so").write_bytes(b"of an earlier build")  # which NineToothed 0.25 would load
    (output / "copy.fingerprint").write_text("of that build")  # by which 0.26 would
    again = run(box, "build")
    assert {name: (output / name).read_bytes() for name in again["files"]} == before
    assert (first["compiles"], again["compiles"]) == (1, 0)


def test_a_lazy_library_is_not_built_before_it_is_called(box: Sandbox) -> None:
    for compiles in (1, 0):
        found = run(box, "lazy")
        assert (found["before"], found["compiles"]) == (0, compiles)


def test_a_library_whose_processes_see_another_global_stays_with_its_rank(box: Sandbox) -> None:
    """They import the script anew: the key of what this process sees would hold code of another value."""
    assert run(box, "moved")["compiles"] == 1
    assert not libraries(box)
    assert (run(box, "build")["compiles"], len(libraries(box))) == (1, 1)


def test_an_autotuned_library_is_left_to_ninetoothed(box: Sandbox) -> None:
    assert "an autotuned library names a file of its directory" in run(box, "tuned")["said"]
    assert not libraries(box)


def test_a_library_that_another_python_compiles_is_left_to_ninetoothed(box: Sandbox) -> None:
    other = box.root / "bin" / "python"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    assert (
        "with the python of PATH, which is not this one"
        in run(box, "build", PATH=f"{other.parent}:{box.environment['PATH']}")["said"]
    )
    assert not libraries(box)


def test_a_release_that_differs_is_left_alone(box: Sandbox) -> None:
    said = run(box, "differs")["said"]
    assert said.count("_make differs: kcoord stands aside from kernels") == 1
