"""CuTe DSL's kernels: what jobs share, and what they do not."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts.catalog import local_manifests
from tests.support.command import KCOORD
from tests.support.sandbox import PROGRAMS, Sandbox

pytestmark = pytest.mark.skipif(find_spec("nvidia_cutlass_dsl") is None, reason="needs nvidia-cutlass-dsl")

KERNELS = PROGRAMS / "cutedsl_kernels.py"
TVM_FFI = "--enable-tvm-ffi"


@pytest.fixture
def machine(sandbox: Sandbox) -> Sandbox:
    """A sandbox in which kernels are compiled for a GPU that need not be there."""
    sandbox.environment |= {"HOME": str(sandbox.root), "CUTE_DSL_ARCH": "sm_90a", "OMP_NUM_THREADS": "1"}
    return sandbox


def run(machine: Sandbox, *modes: str, **more: str) -> dict[str, Any]:
    return outcome(machine.run(KERNELS, *modes, **more))


def outcome(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {**found, "printed": done.stdout, "said": done.stderr}


def count(machine: Sandbox, *modes: str, **more: str) -> int:
    compiles: int = run(machine, *modes, **more)["compiles"]
    return compiles


def manifests(machine: Sandbox) -> list[Path]:
    return list(local_manifests(machine.local))


@pytest.mark.parametrize("torch", ["torch", "late"])
def test_a_launched_script_is_hooked_whether_torch_or_cute_dsl_is_imported_first(machine: Sandbox, torch: str) -> None:
    pytest.importorskip("torch")
    launch = (*KCOORD, "exec", "--", sys.executable, str(KERNELS), "launched", torch)
    first = outcome(machine.run(*launch))
    again = outcome(machine.run(*launch))
    assert (first["compiles"], again["compiles"], again["built"]) == (1, 0, first["built"])


# The module, in place.


def test_a_loaded_kernel_makes_the_object_file_that_a_compiled_one_makes(machine: Sandbox) -> None:
    stock = run(machine, "export", KCOORD_DISABLE="1")
    compiled, loaded = run(machine, "export"), run(machine, "export")
    assert (compiled["compiles"], loaded["compiles"]) == (1, 0)
    assert stock["built"] == compiled["built"] == loaded["built"]


def test_a_function_that_is_called_runs_after_a_load(machine: Sandbox) -> None:
    """It runs on this processor. CuTe DSL's own directory, which it asks first for calls, is a new one."""
    if version("nvidia-cutlass-dsl").startswith("4.4."):
        pytest.skip("this release needs a GPU's driver for functions of the processor, too")
    compiled = run(machine, "call")
    shutil.rmtree(machine.root / "tmp")
    (machine.root / "tmp").mkdir()
    loaded = run(machine, "call")
    assert (compiled["compiles"], loaded["compiles"]) == (1, 0)
    assert "greetings 3" in compiled["printed"]
    assert "greetings 3" in loaded["printed"]


@pytest.mark.skipif(find_spec("tvm_ffi") is None, reason="needs tvm_ffi")
def test_the_functions_for_tvm_ffi_are_each_ranks_own(machine: Sandbox) -> None:
    """CuTe DSL adds them to the compiled module, by what only the caller's process knows."""
    stock = run(machine, "export", KCOORD_DISABLE="1", OPTIONS=TVM_FFI)
    compiled, loaded = run(machine, "export", OPTIONS=TVM_FFI), run(machine, "export", OPTIONS=TVM_FFI)
    assert (compiled["compiles"], loaded["compiles"]) == (1, 0)
    assert stock["built"] == compiled["built"] == loaded["built"]
    assert count(machine) == 0, "without them it is the same kernel"


def test_a_kernel_that_cannot_be_written_is_still_the_ranks_own(machine: Sandbox) -> None:
    found = run(machine, "unwritable")
    assert (found["compiles"], manifests(machine)) == (1, [])
    failed = machine.run(KERNELS, "unserializable")
    assert failed.returncode == 0, failed.stderr
    assert "an error in kcoord, please report it: TypeError" in failed.stderr
    assert manifests(machine) == []
    assert run(machine)["built"] == found["built"]


def test_a_signal_that_the_script_handles_while_a_kernel_is_written_is_the_scripts(machine: Sandbox) -> None:
    assert "TimeoutError: the script's" in machine.run(KERNELS, "interrupted").stderr
    assert (count(machine), len(manifests(machine))) == (1, 1)


# The key, beyond the trace.


def test_code_that_may_name_source_lines_has_a_key_of_its_own(machine: Sandbox) -> None:
    option = "--generate-line-info"
    assert count(machine) == 1
    assert (count(machine, OPTIONS=option), count(machine, OPTIONS=option)) == (1, 0)
    elsewhere = machine.root / "elsewhere.py"
    shutil.copyfile(KERNELS, elsewhere)
    assert outcome(machine.run(elsewhere, OPTIONS=option))["compiles"] == 1
    assert outcome(machine.run(elsewhere))["compiles"] == 0


def test_a_variable_that_changes_code_gives_another_key(machine: Sandbox) -> None:
    changed = {"CUTE_DSL_ENABLE_ASSERTIONS": "1"}
    assert count(machine) == 1
    assert (count(machine, **changed), count(machine, **changed)) == (1, 0)


# What is not shared.


def test_a_compile_that_keeps_files_takes_place(machine: Sandbox) -> None:
    """TileLang's kernels of ``cutedsl`` are made this way: it reads the cubin."""
    files = machine.root / "files"
    files.mkdir()
    assert count(machine) == 1
    for _ in range(2):
        found = run(machine, OPTIONS=f"--keep-cubin --dump-dir={files}", KERNELS="2")
        kept = list(files.glob("*.cubin"))
        assert (found["compiles"], len(kept)) == (2, 2)
        assert found["said"].count("is compiled by each rank for itself: dump-") == 1
        for path in kept:
            path.unlink()
    assert len(manifests(machine)) == 1


def test_a_variable_that_keeps_files_keeps_compiles_in_the_process(machine: Sandbox) -> None:
    assert (
        "CUTE_DSL_KEEP asks for files" in run(machine, CUTE_DSL_KEEP="ir", CUTE_DSL_DUMP_DIR=str(machine.root))["said"]
    )
    assert not manifests(machine)


def test_a_release_whose_compiler_has_another_signature_is_served_at_its_pass_manager(machine: Sandbox) -> None:
    assert (count(machine, "differs"), count(machine, "differs"), count(machine)) == (1, 0, 0)
