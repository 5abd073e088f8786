"""FlyDSL's kernels: what jobs share, and what they do not."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts.catalog import local_manifests
from tests.support.command import KCOORD
from tests.support.sandbox import PROGRAMS, Sandbox
from tests.unit.backends.flydsl import rocm

pytestmark = pytest.mark.skipif(bool(rocm.why_not()), reason=rocm.why_not() or "-")

KERNELS = PROGRAMS / "flydsl_kernels.py"
OWN = "FLYDSL_RUNTIME_ENABLE_CACHE"
DIRECTORY = "FLYDSL_RUNTIME_CACHE_DIR"


@pytest.fixture
def machine(sandbox: Sandbox) -> Sandbox:
    """A sandbox with a ROCm of its own, and a home without a cache."""
    home = {"HOME": str(sandbox.root), "ROCM_PATH": str(rocm.make(sandbox.root))}
    sandbox.environment |= {**home, "ARCH": "gfx942", "COMPILE_ONLY": "1"} | rocm.OWN_CACHE_OFF
    return sandbox


def run(machine: Sandbox, *modes: str, **more: str) -> dict[str, Any]:
    return outcome(machine.run(KERNELS, *modes, **more))


def outcome(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {**found, "said": done.stderr}


def count(machine: Sandbox, *modes: str, **more: str) -> int:
    return len(run(machine, *modes, **more)["compiles"])


def manifests(machine: Sandbox) -> list[Path]:
    return list(local_manifests(machine.local))


def pickles(machine: Sandbox, directory: str = ".flydsl") -> list[Path]:
    return list((machine.root / directory).rglob("*.pkl"))


def test_a_launched_script_is_hooked_though_flydsl_imports_torch_first(machine: Sandbox) -> None:
    launch = (*KCOORD, "exec", "--", sys.executable, str(KERNELS), "launched")
    first = outcome(machine.run(*launch))
    again = outcome(machine.run(*launch))
    assert (first["compiles"], again["compiles"], again["codes"]) == (["gfx942"], [], first["codes"])


# The key, beyond the trace.


def replace_linker(root: Path) -> None:
    link = root / "rocm" / "llvm" / "bin" / "ld.lld"
    script = f'#!/bin/bash\nexec -a ld.lld {link.resolve()} "$@"\n'
    link.unlink()
    link.write_text(script)
    link.chmod(0o755)


def change_device_libraries(root: Path) -> None:
    (root / "rocm" / "amdgcn" / "bitcode" / "ocml.bc").write_bytes(b"another")


@pytest.mark.parametrize("change", [replace_linker, change_device_libraries])
def test_a_file_of_rocm_that_has_changed_gives_another_key(machine: Sandbox, change: Any) -> None:
    assert count(machine) == 1
    change(machine.root)
    assert (count(machine), count(machine)) == (1, 0)


@pytest.mark.parametrize("mode", ["hints", "options"])
def test_hints_and_llvms_options_are_in_the_key(machine: Sandbox, mode: str) -> None:
    assert count(machine) == 1
    assert (count(machine, mode), count(machine, mode), count(machine)) == (1, 0, 0)


def test_code_that_names_source_lines_has_a_key_of_its_own(machine: Sandbox) -> None:
    lines = {"FLYDSL_DEBUG_ENABLE_DEBUG_INFO": "1"}
    assert count(machine) == 1
    assert (count(machine, **lines), count(machine, **lines)) == (1, 0)
    elsewhere = machine.root / "elsewhere.py"
    shutil.copyfile(KERNELS, elsewhere)
    assert len(outcome(machine.run(elsewhere, **lines))["compiles"]) == 1
    assert len(outcome(machine.run(elsewhere))["compiles"]) == 0


# What is not shared.


def test_a_kernel_that_links_libraries_is_not_shared(machine: Sandbox) -> None:
    triton = find_spec("triton")
    if triton is None or triton.origin is None:
        pytest.skip("needs a library: Triton's")
    library = {"LIBRARY": str(Path(triton.origin).with_name("backends") / "amd" / "lib" / "ocml.bc")}
    for _ in range(2):
        found = run(machine, "links", **library)
        assert len(found["compiles"]) == 1
        assert found["said"].count("compiled by each rank for itself") == 1
    assert not manifests(machine)


def test_a_compile_that_the_user_watches_takes_place(machine: Sandbox) -> None:
    watched = {"FLYDSL_DUMP_IR": "1", "FLYDSL_DUMP_DIR": str(machine.root / "dumps")}
    assert count(machine) == 1
    assert "FLYDSL_DUMP_IR shows each compile" in run(machine, **watched)["said"]
    assert list((machine.root / "dumps").rglob("*.mlir"))
    assert len(manifests(machine)) == 1


def test_kernels_that_another_llvm_compiles_are_not_shared(machine: Sandbox) -> None:
    program = machine.root / "llvm" / "bin" / "mlir-opt"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    failed = machine.run(KERNELS, FLYDSL_COMPILE_LLVM_DIR=str(machine.root / "llvm"))
    assert "FLYDSL_COMPILE_LLVM_DIR names another LLVM" in failed.stderr
    assert "External LLVM codegen failed" in failed.stderr
    assert "please report it" not in failed.stderr


def test_a_release_whose_compiler_has_another_signature_is_served_at_its_pass_manager(machine: Sandbox) -> None:
    assert (count(machine, "differs"), count(machine, "differs"), count(machine)) == (1, 0, 0)


# FlyDSL's own cache.


@pytest.mark.skipif(rocm.KEYS_ITS_TRACES, reason="its own cache is left on")
def test_flydsls_own_cache_is_off_unless_the_user_has_set_it(machine: Sandbox) -> None:
    assert run(machine)["said"] == ""
    assert not pickles(machine)
    assert (count(machine, **{OWN: "1"}), len(pickles(machine))) == (0, 1)


@pytest.mark.skipif(not rocm.KEYS_ITS_TRACES, reason="its own cache is off")
def test_flydsls_own_cache_is_left_on_where_it_keys_traces(machine: Sandbox) -> None:
    own = {DIRECTORY: str(machine.root / ".flydsl")}
    assert (count(machine, **own), len(pickles(machine)), len(manifests(machine))) == (1, 1, 1)
    assert (count(machine, **own), count(machine)) == (0, 0), "from its own cache, and from kcoord's"


def test_a_user_who_switches_it_off_keeps_kernels_private(machine: Sandbox) -> None:
    assert count(machine) == 1
    private = run(machine, **{OWN: "0"})
    assert f"{OWN} is off" in private["said"]
    assert (len(private["compiles"]), len(manifests(machine))) == (1, 1)


def test_a_process_that_compiles_for_a_directory_fills_it_and_one_that_only_runs_reads_it(machine: Sandbox) -> None:
    directory = {DIRECTORY: str(machine.root / "shipped")}
    assert count(machine) == 1
    assert (count(machine, **directory), len(pickles(machine, "shipped"))) == (0, 1)
    only = {"FLYDSL_RUNTIME_RUN_ONLY": "1"}
    assert run(machine, **directory, **only)["compiles"] == []
    refused = machine.run(KERNELS, **only, **{DIRECTORY: str(machine.root / "empty")})
    assert "no usable AOT cache" in refused.stderr
