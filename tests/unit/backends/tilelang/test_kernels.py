"""TileLang's kernels and its autotuner's choices: what jobs share, and what they do not."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from kcoord.artifacts.catalog import local_manifests
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
    recorded = sandbox.root / "store" / "v1" / "profiles"
    eventually(lambda: any(path.is_file() for path in recorded.rglob("*")), timeout=60, what="the profile is stored")
    shutil.rmtree(sandbox.root / "store" / "v1" / "objects")
    store["KCOORD_LOCAL_DIR"] = str(sandbox.root / "new")
    warmed = sandbox.run(*KCOORD, "warmup", "job", **environment(sandbox, "cache", **store))
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


def test_a_header_of_the_flags_directories_counts_by_its_content(sandbox: Sandbox) -> None:
    header, values = sandbox.root / "include" / "value.h", []
    header.parent.mkdir()
    for number in (2, 2, 3):
        text = f'extern "C" inline float value() {{ return {number}.0f; }}\n'
        if not header.exists() or header.read_text() != text:
            header.write_text(text)
        found = run(sandbox, "includes", FLAGS=json.dumps([f"-I{header.parent}"]))
        values.append((found["value"], found["compiles"]))
    assert values == [(2.0, 1), (2.0, 0), (3.0, 1)]


@pytest.mark.parametrize("flag", ["-I.", "-include value.h"])
def test_a_header_that_no_key_holds_keeps_the_kernel_in_the_process(sandbox: Sandbox, flag: str) -> None:
    (sandbox.root / "value.h").write_text('#pragma once\nextern "C" inline float value() { return 2.0f; }\n')
    flags = [flag.replace("value.h", str(sandbox.root / "value.h")), f"-I{sandbox.root}"]
    assert run(sandbox, "includes", FLAGS=json.dumps(flags))["value"] == 2.0
    assert not list(local_manifests(sandbox.local))


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
