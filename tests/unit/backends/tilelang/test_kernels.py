"""TileLang's kernels and its autotuner's choices: what jobs share, and what they do not."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from kcoord.artifacts.catalog import local_manifests
from kcoord.backends.tilelang import includes
from kcoord.backends.tilelang.adapter import TileLangBackend
from kcoord.backends.tilelang.request import Kernel
from kcoord.errors import KeyFactorError
from tests.support.command import KCOORD
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish

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


def test_a_kernel_of_a_profile_is_compiled_before_the_job(sandbox: Sandbox) -> None:
    """vllm#47249: a worker dies while it compiles TileLang's kernels in mid-run."""
    store = {"KCOORD_STORE": str(sandbox.root / "store"), "KCOORD_STORE_CREATE": "1", "KCOORD_PROFILE": "job"}
    assert run(sandbox, "compile", **store)["compiles"] == 1
    recorded = sandbox.root / "store" / "v2" / "profiles"
    eventually(lambda: any(path.is_file() for path in recorded.rglob("*")), timeout=60, what="the profile is stored")
    shutil.rmtree(sandbox.root / "store" / "v2" / "objects")
    store["KCOORD_LOCAL_DIR"] = str(sandbox.root / "new")
    warmed = sandbox.run_kcoord(*KCOORD, "warmup", "job", **environment(sandbox, "cache", **store))
    assert "1 compiled" in warmed.stdout, warmed.stdout + warmed.stderr
    assert run(sandbox, "compile", **store)["compiles"] == 0


def test_an_artifact_that_does_not_load_is_compiled_for_this_process_and_stays(sandbox: Sandbox) -> None:
    """TileLang's own cache removes the entry, under the feet of the other ranks."""
    run(sandbox, "compile")
    (manifest,) = local_manifests(sandbox.local)
    found = run(sandbox, "unloadable")
    assert (found["value"], found["compiles"]) == (3.0, 1)
    assert list(local_manifests(sandbox.local)) == [manifest]
    assert run(sandbox, "compile")["compiles"] == 0


def test_a_kernel_that_cannot_be_written_is_still_the_ranks_own(sandbox: Sandbox) -> None:
    """TileLang's own cache logs the error, and goes on."""
    found = run(sandbox, "unsavable")
    assert (found["value"], "is not shared, its files cannot be written" in found["said"]) == (3.0, True)
    assert not list(local_manifests(sandbox.local))


def test_a_half_written_file_is_not_shared(sandbox: Sandbox) -> None:
    assert run(sandbox, "full")["value"] == 3.0
    assert not list(local_manifests(sandbox.local))


def test_without_a_cuda_toolkit_tilelang_says_its_own_error(sandbox: Sandbox) -> None:
    found = run(sandbox, "toolless")
    assert "Failed to automatically detect CUDA" in found["error"]
    assert "is compiled by each rank for itself: Failed to automatically detect CUDA" in found["said"]


def test_kernels_of_nvrtc_are_not_shared() -> None:
    """Their key would hold neither libnvrtc nor cuda-bindings."""
    target = SimpleNamespace(kind=SimpleNamespace(name="cuda"))
    request = Kernel(None, None, "nvrtc", target, None, None, {}, None)
    assert TileLangBackend().bypass(request) == "kernels of nvrtc for cuda have not been tried"


@pytest.mark.parametrize("flags", [["-I{}"], ["-isystem {}"], "-O1 -I{}"])
def test_headers_of_the_flags_directories_count_by_their_content(sandbox: Sandbox, flags: list[str] | str) -> None:
    directory = sandbox.root / "include"
    (directory / "sub").mkdir(parents=True)
    (directory / "value.h").write_text('#include <cstdint>\n#include "sub/value.h"\n')
    sources = ['#include "value.h"\n', "#include <value.h>", '// two lines\n#include "sub/value.h"\n']
    given = {"FLAGS": json.dumps(flags).replace("{}", str(directory)), "SOURCES": json.dumps(sources)}
    rows = []
    for number in (2, 2, 3):
        text = f'#pragma once\nextern "C" inline float value() {{ return {number}.0f; }}\n'
        if not (directory / "sub" / "value.h").exists() or number == 3:
            (directory / "sub" / "value.h").write_text(text)
        found = run(sandbox, "includes", **given)
        rows.append((found["values"], found["compiles"]))
    assert rows == [([2.0] * 3, 3), ([2.0] * 3, 0), ([3.0] * 3, 3)]


@pytest.mark.parametrize("flag", ["-I.", "-include {}/value.h", "-iprefix {}", "@{}/flags"])
def test_a_file_of_the_flags_that_no_key_holds_keeps_kernels_in_the_process(sandbox: Sandbox, flag: str) -> None:
    (sandbox.root / "value.h").write_text('#pragma once\nextern "C" inline float value() { return 2.0f; }\n')
    (sandbox.root / "flags").write_text("-O1\n")
    given = {"FLAGS": json.dumps([flag.replace("{}", str(sandbox.root)), f"-I{sandbox.root}"])}
    assert run(sandbox, "includes", **given, SOURCES='["#include <value.h>"]')["values"] == [2.0]
    assert not list(local_manifests(sandbox.local))


def test_a_header_outside_of_the_flags_directories_keeps_kernels_in_the_process(sandbox: Sandbox) -> None:
    (sandbox.root / "include" / ".hidden").mkdir(parents=True)
    text = '#pragma once\nextern "C" inline float value() { return 2.0f; }\n'
    for name in ("value.h", "include/.hidden/value.h"):
        (sandbox.root / name).write_text(text)
    (sandbox.root / "include" / "by.h").write_text('#include "../value.h"\n')
    sources = [
        f'#include "{sandbox.root}/value.h"',
        f'// two lines\n#include "{sandbox.root}/value.h"\n',
        f"#include <{sandbox.root}/value.h>",
        '#include "../value.h"',
        "/* of\n it */ # /**/ include <../value.h>",
        '#include \\\n "../value.h"',
        f'#define HEADER "{sandbox.root}/value.h"\n#include HEADER',
        '#include ".hidden/value.h"',
        "#include <by.h>",
    ]
    given = {"FLAGS": json.dumps([f"-I{sandbox.root}/include"]), "SOURCES": json.dumps(sources)}
    assert run(sandbox, "includes", **given)["values"] == [2.0] * len(sources)
    assert not list(local_manifests(sandbox.local))


def test_a_callback_that_includes_a_header_keeps_kernels_in_the_process(sandbox: Sandbox) -> None:
    (sandbox.root / "value.h").write_text("#pragma once\n")
    found = run(sandbox, "rewritten", CPATH=str(sandbox.root))
    assert (found["value"], "it includes value.h" in found["said"]) == (3.0, True)
    assert not list(local_manifests(sandbox.local))


def test_flags_are_split_as_tilelang_and_nvcc_split_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVCC_APPEND_FLAGS", "-ccbin=/usr/bin/g++ -isystem /d")
    target = SimpleNamespace(kind=SimpleNamespace(name="cuda"))
    configs = {"tl.device_compile_flags": "-I '/a b' --include-path=/c"}
    request = Kernel(None, None, "tvm_ffi", target, None, None, configs, ["'-I/e'"])
    assert includes.directories(request) == ["/e", "/a b", "/c", "/d"]
    with pytest.raises(KeyFactorError, match="No closing quotation"):
        includes.directories(replace(request, flags="-I'/a"))


def test_a_callback_that_kcoord_cannot_see_keeps_kernels_private(sandbox: Sandbox) -> None:
    assert "was registered before kcoord was installed" in run(sandbox, "late")["said"]
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
