"""What only a GPU can show. Skipped where there is none."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kcoord.profiles.parts import load_profile
from kcoord.settings import Settings
from tests.support.command import KCOORD
from tests.support.sandbox import PROGRAMS, Sandbox, eventually

torch = pytest.importorskip("torch")
pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"
NO_GPU = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "-1"}


def train(sandbox: Sandbox, node: str, *flags: str, ranks: int = 2) -> dict[str, Any]:
    """The example's job; a store that `node` shares, and a local directory of its own. Returns its statistics."""
    local, store = sandbox.root / node, sandbox.root / "store"
    command = ["-m", "kcoord_launch.torchrun", "--standalone", "--nproc-per-node", str(ranks), *flags]
    settings = {
        "KCOORD_LOCAL_DIR": str(local),
        "KCOORD_STORE": str(store),
        "KCOORD_STORE_CREATE": "1",
        "KCOORD_JOB": node,
        "OMP_NUM_THREADS": "1",
    }
    done = sandbox.run(*command, EXAMPLE, "--steps", "3", timeout=300, **settings)
    assert done.returncode == 0, done.stderr
    stats = sandbox.run(*KCOORD, "stats", "--json", "--job", node, **settings)
    found: dict[str, Any] = json.loads(stats.stdout)
    return found


def test_what_a_machine_without_gpu_compiled_is_what_the_job_on_a_gpu_asks_for(sandbox: Sandbox) -> None:
    recorded = train(sandbox, "first", "--kcoord-profile", "g")
    assert recorded["compiles"] > 10
    settings = Settings.from_environ({"KCOORD_STORE": str(sandbox.root / "store")})
    eventually(lambda: len(load_profile(settings, "g")) == recorded["compiles"])
    profile = sandbox.root / "profiles"
    shutil.move(sandbox.root / "store" / "v1" / "profiles", profile)
    shutil.rmtree(sandbox.root / "store")  # nothing but the recipes is left
    (sandbox.root / "store" / "v1").mkdir(parents=True)
    shutil.move(profile, sandbox.root / "store" / "v1" / "profiles")
    modules = os.pathsep.join(filter(None, (str(EXAMPLE.parent), os.environ.get("PYTHONPATH"))))
    done = sandbox.run(
        *KCOORD, "warmup", "g", "--json", timeout=300, PYTHONPATH=modules, **NO_GPU,
        KCOORD_STORE=str(sandbox.root / "store"), KCOORD_LOCAL_DIR=str(sandbox.root / "init"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["compiled"] == recorded["compiles"]
    job = train(sandbox, "second")
    assert (job["compiles"], job["failures"]) == (0, 0)
    assert job["store_hits"] >= recorded["compiles"]


def test_a_replay_on_a_gpu_leaves_nothing_to_build_for_the_job(sandbox: Sandbox) -> None:
    """Launchers too, where Triton builds them with the C compiler."""
    train(sandbox, "first", "--kcoord-profile", "g")
    shutil.copytree(sandbox.root / "store" / "v1" / "profiles", sandbox.root / "again" / "profiles")
    shutil.rmtree(sandbox.root / "store" / "v1" / "objects")
    code = "import sys, kcoord; sys.path.insert(0, sys.argv[1]); kcoord.install(); print(kcoord.warmup('g', progress=False))"
    settings = {"KCOORD_LOCAL_DIR": str(sandbox.root / "again")}
    done = sandbox.run("-c", code, EXAMPLE.parent, timeout=300, **settings)
    assert done.returncode == 0, done.stderr
    there = {p.name for p in (sandbox.root / "again" / "triton").glob("*/__triton_launcher*.so")}
    wanted = {p.name for p in (sandbox.root / "first" / "triton").glob("*/__triton_launcher*.so")}
    count = [len(list((sandbox.root / n / "triton").glob("*/__triton_launcher*.so"))) for n in ("again", "first")]
    assert (there, count[0]) == (wanted, count[1])
    assert "0 loaded" in done.stdout


def test_all_ranks_launch_the_configuration_that_was_tuned_first(sandbox: Sandbox) -> None:
    command = ["-m", "kcoord_launch.torchrun", "--standalone", "--nproc-per-node", "2", PROGRAMS / "autotuned.py"]
    first, again = (sandbox.run(*command, timeout=300) for _ in range(2))
    for done, tunes in ((first, True), (again, False)):
        assert done.returncode == 0, done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(lines) == 2
        assert all(line["agreed"] for line in lines)
        shapes = [shape for line in lines for shape in line["shapes"]]
        assert all(shape["right"] for shape in shapes)
        assert any(shape["tuned_here"] for shape in shapes) is tunes


@pytest.mark.parametrize("settings", [{}, {"coordinate_descent_tuning": True}], ids=["", "by descent"])
def test_what_one_node_has_compiled_and_measured_another_node_only_loads(
    sandbox: Sandbox, settings: dict[str, bool]
) -> None:
    """And needs nothing from where the first one kept it: the directory's place is taken by a file."""

    def run(node: str) -> dict[str, Any]:
        variables = {"KCOORD_LOCAL_DIR": str(sandbox.root / node), "KCOORD_STORE": str(sandbox.root / "store")}
        command = ["-m", "kcoord_launch.torchrun", "--standalone", "--nproc-per-node=1", PROGRAMS / "inductor_tuned.py"]
        done = sandbox.run(
            *command,
            json.dumps(settings),
            timeout=300,
            TORCHINDUCTOR_CACHE_DIR=None,
            KCOORD_STORE_CREATE="1",
            **variables,
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    first = run("first")
    assert first["codegens"] > 0
    assert first["measurements"] > 0
    shutil.move(sandbox.root / "first", sandbox.root / "elsewhere")
    (sandbox.root / "first").touch()
    second = run("second")
    assert (second["loss"], second["codegens"]) == (first["loss"], 0)
    if settings:  # a choice by coordinate descent is tried before it is used
        assert second["measurements"] < first["measurements"]
    else:
        assert second["measurements"] == 0
