"""Workers that a job starts itself, in the ways of multiprocessing, torch, vLLM and SGLang."""

from __future__ import annotations

import json

import pytest

from kcoord.packs.recipe import Recipe
from kcoord.rank.pool_start import has_cores_to_spare
from tests.support.profiles import give
from tests.support.sandbox import PROGRAMS, Sandbox, eventually
from tests.support.workers import below_exec, check, reports_in

pytest.importorskip("triton")


@pytest.mark.parametrize(
    ("way", "variables"),
    [
        ("forkserver_pool", {}),
        ("vllm", {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}),
        ("vllm", {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}),
        ("sglang", {}),
    ],
)
def test_workers_compile_each_kernel_once(sandbox: Sandbox, way: str, variables: dict[str, str]) -> None:
    # they are killed as soon as they have loaded: the figures of a process' last second are lost
    check(sandbox, below_exec(sandbox, "workers.py", way, **variables), summary=False)


@pytest.mark.parametrize(
    ("ranks", "arguments"), [(2, ()), (1, ("--beside-a-pool",))], ids=["ranks", "a rank and a pool"]
)
def test_ranks_that_torchrun_restarts_find_the_kernels_of_the_first_attempt(
    sandbox: Sandbox, ranks: int, arguments: tuple[str, ...]
) -> None:
    pytest.importorskip("torch")
    if arguments and not has_cores_to_spare(ranks):
        pytest.skip("without a second core there is no pool")
    if arguments:  # a job of which nothing is known has none
        give(sandbox, [Recipe("triton", "kernels", "gone", {}, "cuda:90", 1.0, 0)], "restarts")
    program = (PROGRAMS / "restarted.py", reports_in(sandbox), *arguments)
    launch = ("-m", "kcoord_launch.torchrun", "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1")
    done = sandbox.run_forked(*launch, *program, KCOORD_PROFILE="restarts" if arguments else "off")
    assert done.returncode == 0, done.stderr
    assert "AssertionError" not in done.stderr, "no pool ran"
    first, second = ([json.loads(path.read_text()) for path in reports_in(sandbox).glob(f"{n}.*.json")] for n in (0, 1))
    assert (len(first), len(second)) == (ranks, ranks), done.stderr
    assert sum(len(report["compiled"]) for report in first) == 2
    assert sum(len(report["compiled"]) for report in second) <= 1, "the one whose compiler died, unless the pool had it"
    assert "3 compiled" in done.stderr
    eventually(lambda: not sandbox.processes(), what="neither the agent nor a pool is left")
    assert not list(sandbox.local.glob("*.sock"))
