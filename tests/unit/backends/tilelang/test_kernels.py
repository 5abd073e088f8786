"""TileLang's kernels and its autotuner's choices: what jobs share, and what they do not."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from kcoord.artifacts.catalog import local_manifests
from kcoord.backends.tilelang.conditions import reason_not_shared
from kcoord.backends.tilelang.request import Kernel
from tests.support.command import KCOORD
from tests.support.sandbox import PROGRAMS, Sandbox, finish

pytestmark = pytest.mark.skipif(find_spec("tilelang") is None, reason="needs tilelang")

KERNELS = PROGRAMS / "tilelang_kernels.py"


def environment(sandbox: Sandbox, cache: str, **more: str) -> dict[str, str]:
    return {"TILELANG_CACHE_DIR": str(sandbox.root / cache), "OMP_NUM_THREADS": "1", **more}


def run(sandbox: Sandbox, mode: str, *arguments: object, cache: str = "cache", **more: str) -> dict[str, Any]:
    done = sandbox.run(KERNELS, mode, *map(str, arguments), **environment(sandbox, cache, **more))
    return outcome(done)


def outcome(done: Any) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    found: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    return {**found, "said": done.stderr}


def test_a_launched_script_is_hooked_though_tilelang_imports_torch_first(sandbox: Sandbox) -> None:
    launch = (*KCOORD, "exec", "--", sys.executable, str(KERNELS), "launched")
    assert outcome(sandbox.run(*launch, **environment(sandbox, "one")))["compiles"] == 1
    assert outcome(sandbox.run(*launch, **environment(sandbox, "two")))["compiles"] == 0


def test_a_kernel_that_cannot_be_written_is_still_the_ranks_own(sandbox: Sandbox) -> None:
    """TileLang's own cache logs the error, and goes on."""
    found = run(sandbox, "unsavable")
    assert (found["value"], "is not shared, its files cannot be written" in found["said"]) == (3.0, True)
    assert not list(local_manifests(sandbox.local))


def test_without_a_cuda_toolkit_tilelang_says_its_own_error(sandbox: Sandbox) -> None:
    found = run(sandbox, "toolless")
    assert "Failed to automatically detect CUDA" in found["error"]
    assert "is compiled by each rank for itself: Failed to automatically detect CUDA" in found["said"]


def reason(*flags: str, code: str = "", execution: str = "cython", device_flags: str = "") -> str:
    """Why a kernel of the processor with this code and these flags is not shared."""
    pytest.importorskip("tilelang")
    import tvm

    target = SimpleNamespace(kind=SimpleNamespace(name="c"))
    configs = {"tl.device_compile_flags": device_flags}
    function = tvm.runtime.convert(code)  # whose IR is a string
    return reason_not_shared(Kernel(None, function, execution, target, None, None, configs, flags))


def test_kernels_of_nvrtc_are_not_shared() -> None:
    """Their key would hold neither libnvrtc nor cuda-bindings."""
    assert reason(execution="nvrtc") == "kernels of nvrtc for c have not been tried"


@pytest.mark.parametrize(
    "flag",
    ["-I.", "-I /a", "-isystem /a", "'-I' '/a'", "-include a.h", "-iprefix a", "@flags", "--include-path=a", "-Xcompiler=-Ia",
     "/a.o", "-L/a", "-x=a/b"],
)  # fmt: skip
def test_a_flag_that_names_files_keeps_a_kernel_in_the_process(monkeypatch: pytest.MonkeyPatch, flag: str) -> None:
    assert "names files that its key does not hold" in reason("-O2", flag)
    assert "names files that its key does not hold" in reason(device_flags=f"-O2 {flag}")
    if not flag.startswith(("/", "-L", "-x")):
        monkeypatch.setenv("NVCC_APPEND_FLAGS", flag)
        assert "names files that its key does not hold" in reason()


def test_flags_that_name_no_file_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_PREPEND_FLAGS", "-ccbin=/usr/bin/g++")  # a tool
    assert not reason("-O2", "-DPATH=a/b -use_fast_math", device_flags="--ptxas-options=-v")


@pytest.mark.parametrize(
    "code",
    [
        '#include "/a/value.h"',
        '// two lines\n#include "value.h"\n',
        "#include <value.h>",
        "#include <math>\n#include <../value.h>",
        "/* of\n it */ # /**/ include <value.h>",
        '#include \\\n "value.h"',
        '#define HEADER "value.h"\n#include HEADER',
        '#include ".hidden/value.h"',
        '#include "math.h"',
        'asm(".incbin \\"value\\"");',
    ],
)
def test_code_that_includes_a_file_of_the_users_keeps_a_kernel_in_the_process(code: str) -> None:
    assert reason(code=code)
    assert not reason(
        code='#include <cstdint>\n#include <math.h>\n#include "tl_templates/cuda/common.h"\n// #include "value.h"'
    )


def test_a_kernel_that_includes_a_file_of_the_users_works_and_is_not_shared(sandbox: Sandbox) -> None:
    (sandbox.root / "value.h").write_text('#pragma once\nextern "C" inline float value() { return 2.0f; }\n')
    given = {"FLAGS": json.dumps([f"-I{sandbox.root}"]), "SOURCES": json.dumps([f'#include "{sandbox.root}/value.h"'])}
    assert run(sandbox, "includes", **given)["values"] == [2.0]
    assert not list(local_manifests(sandbox.local))


@pytest.mark.parametrize("mode", ["late", "rewritten"])
def test_kernels_whose_code_a_callback_rewrites_are_not_shared(sandbox: Sandbox, mode: str) -> None:
    """It was registered before kcoord was installed, or after."""
    (sandbox.root / "value.h").write_text("#pragma once\n")
    found = run(sandbox, mode, CPATH=str(sandbox.root))
    assert (found["value"], "c_host_postproc is registered" in found["said"]) == (3.0, True)
    assert not list(local_manifests(sandbox.local))


def test_ranks_that_tune_at_once_agree_and_a_later_job_measures_nothing(sandbox: Sandbox) -> None:
    processes = [
        sandbox.start(KERNELS, "tune", **environment(sandbox, f"rank{fast}", FAST=str(fast))) for fast in (1, 2)
    ]
    found = [outcome(finish(process)) for process in processes]
    assert len({each["value"] for each in found}) == 1
    later = run(sandbox, "tune", cache="later", FAST="1")
    assert (later["value"], later["measured"], later["compiles"]) == (found[0]["value"], 0, 0)
    assert not any(each["locked"] for each in (*found, later)), "other threads' tuners would wait, too"


def test_a_changed_helper_is_tuned_anew_which_tilelangs_own_key_does_not_see(sandbox: Sandbox) -> None:
    assert run(sandbox, "tune", 2, FAST="1")["value"] == 2.0
    changed = run(sandbox, "tune", 5, FAST="2")
    assert (changed["value"], changed["measured"]) == (10.0, 2)
