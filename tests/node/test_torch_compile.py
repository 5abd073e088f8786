"""torch.compile across ranks: each unit is traced and each graph generated once, and what comes out is stock's to the bit."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kcoord.packs.pack_files import packs_of
from tests.support.command import KCOORD, as_json
from tests.support.sandbox import PROGRAMS, Sandbox, Started, finish, sandboxed
from tests.support.waiting import eventually as within

pytest.importorskip("torch")

COMPILED = PROGRAMS / "compiled.py"
_meetings = itertools.count()
LAUNCH = ("-m", "kcoord_launch.torchrun", "--standalone")
FOUR, TWO = ("ddp", "plain"), ("regional", "fsdp", "activated", "cast", "dynamic", "convolutions")
PASSED_OVER = ("ddp", "convolutions")  # units of DDPOptimizer, which no two ranks trace
LONG = 400.0  # seconds; torch imports and compiles, beside other tests
WORK = ("traces", "codegens", "libraries")
Outcome = dict[str, Any]


def eventually(condition: Callable[[], object]) -> None:
    """Torch itself takes seconds to import, and more beside other tests."""
    within(condition, LONG)


def environment(box: Sandbox, caches: str) -> dict[str, str]:
    """`caches`: torch's own, which ranks of one node share."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(box.root / caches),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_VEC_ISA_OK": "1",
        "OMP_NUM_THREADS": "1",
        "KCOORD_AGENT_TIMEOUT": "20",  # an agent that is late on a busy machine would cost one compile more
    }


def outcomes(done: subprocess.CompletedProcess[str]) -> list[Outcome]:
    assert done.returncode == 0, done.stderr
    assert "please report it" not in done.stderr
    assert "stands aside from" not in done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def stock(box: Sandbox, *models: str, caches: str = "stock") -> list[Outcome]:
    """One process without kcoord."""
    arguments = json.dumps({"models": models, "alone": True})
    return outcomes(box.run_forked(COMPILED, arguments, STOCK="1", timeout=LONG, **environment(box, caches)))


@pytest.fixture(scope="module")
def true() -> dict[str, Outcome]:
    """What stock makes of each model, and the work that it has."""
    with sandboxed() as box:
        return {each["model"]: each for each in stock(box, *FOUR, *TWO)}


def ranks(box: Sandbox, count: int, *models: str, caches: str = "ranks", **more: str) -> list[Outcome]:
    """A world of `count` ranks, without a launcher."""
    return world(box, count, COMPILED, json.dumps({"models": models, "marks": True}), caches=caches, **more)


def launched(box: Sandbox, count: int, *models: str) -> list[Outcome]:
    """The same, as a user does."""
    launch = (*LAUNCH, f"--nproc-per-node={count}", COMPILED, json.dumps({"models": models, "marks": True}))
    return outcomes(finish(box.fork_torchrun(*launch, **environment(box, "ranks")), LONG))


def world(box: Sandbox, count: int, *program: str | Path, caches: str, **more: str) -> list[Outcome]:
    meeting = str(box.root / f"meeting{next(_meetings)}")
    common = {"WORLD_SIZE": str(count), "MEETING": meeting, **environment(box, caches), **more}
    started = [box.fork(*program, RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(count)]
    return [outcome for process in started for outcome in outcomes(finish(process, LONG))]


def result(outcome: Outcome) -> tuple[Any, ...]:
    return outcome["losses"], outcome["gradients"]


def work(found: list[Outcome], model: str) -> dict[str, int]:
    """What torch did for `model`, in all ranks together."""
    return {kind: sum(each.get(kind, 0) for each in found if each["model"] == model) for kind in WORK}


@pytest.mark.parametrize(
    ("start_ranks", "count", "models"), [(ranks, 4, FOUR), (launched, 2, TWO)], ids=["four ranks", "two of torchrun"]
)
def test_all_ranks_together_do_the_work_of_one_and_get_its_results_to_the_bit(
    sandbox: Sandbox, true: dict[str, Outcome], start_ranks: Any, count: int, models: tuple[str, ...]
) -> None:
    found = start_ranks(sandbox, count, *models)
    for model in models:
        mine = [each for each in found if each["model"] == model]
        assert len(mine) == count
        assert {str(result(each)) for each in mine} == {str(result(true[model]))}, model
        needed, done = work([true[model]], model), work(found, model)
        traces, most = done.pop("traces"), needed.pop("traces")
        assert done == needed, (model, needed, done)
        assert traces == most if model in PASSED_OVER else most <= traces <= count * most, (model, most, traces)
    if "ddp" in models:
        assert max(each.get("traces", 0) for each in found if each["model"] == "ddp") < work(found, "ddp")["traces"], (
            "one rank did everything"
        )


def test_another_node_traces_nothing_and_generates_nothing(sandbox: Sandbox) -> None:
    store = {"KCOORD_STORE": str(sandbox.root / "store"), "KCOORD_STORE_CREATE": "1"}
    models = ("ddp", "plain")
    first = ranks(sandbox, 1, *models, caches="first", **store)
    second = ranks(sandbox, 1, *models, caches="second", KCOORD_LOCAL_DIR=str(sandbox.root / "other"), **store)
    for model, before, after in zip(models, first, second, strict=True):
        assert work([before], model)["traces"] > 0
        assert work([after], model) == dict.fromkeys(WORK, 0)
        assert result(after) == result(before)
    (warm,) = stock(sandbox, "plain", caches="first")  # torch's own caches hold what the ranks put there
    assert result(warm) == result(first[1])
    assert work([warm], "plain")["traces"] == 0


def test_what_torchs_own_cache_has_counts_as_loaded_by_the_keys_of_the_compile(sandbox: Sandbox) -> None:
    """In the local directory of a node it answers before kcoord does."""
    ranks(sandbox, 1, "plain", KCOORD_JOB="cold")
    ranks(sandbox, 2, "plain", KCOORD_JOB="warm")
    first, second = (as_json(sandbox, "stats", "--job", job) for job in ("cold", "warm"))
    assert first["compiles"] == first["kernels"] == second["kernels"] > 0
    assert (second["compiles"], second["local_hits"]) == (0, 2 * first["kernels"])
    assert second["saved_seconds"] > 0


def test_each_rank_takes_its_own_part_of_a_tensor_that_is_spread_over_a_mesh(sandbox: Sandbox) -> None:
    """Torch 2.13's key of such a unit is the same on all ranks, and its trace is not: each process traces, as in stock."""
    for caches in ("ranks", "ranks", "others"):
        found = world(sandbox, 2, PROGRAMS / "spread.py", caches=caches)
        assert found == [{"right": True, "traces": 1}] * 2
        assert artifacts(sandbox) == 0


def test_ranks_that_torchrun_starts_again_load_what_was_published_before(
    sandbox: Sandbox, true: dict[str, Outcome]
) -> None:
    arguments = json.dumps({"models": ["ddp"], "marks": True, "dies": True})
    launch = (*LAUNCH, "--nproc-per-node=2", "--max-restarts=1", COMPILED, arguments)
    fresh = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else gloo meets the addresses of dead ranks, in stock too
    found = outcomes(finish(sandbox.fork_torchrun(*launch, **fresh, **environment(sandbox, "ranks")), LONG))
    assert {str(result(each)) for each in found} == {str(result(true["ddp"]))}
    assert len(found) == 2
    assert 0 < work(found, "ddp")["traces"] < true["ddp"]["traces"]


def test_a_bundle_carries_units_to_another_cluster(sandbox: Sandbox, true: dict[str, Outcome]) -> None:
    def cluster(name: str) -> dict[str, str]:
        return {
            "KCOORD_STORE": str(sandbox.root / f"{name}-store"),
            "KCOORD_STORE_CREATE": "1",
            "KCOORD_LOCAL_DIR": str(sandbox.root / f"{name}-local"),
        }

    bundle = str(sandbox.root / "bundle")
    ranks(sandbox, 1, "plain", caches="here", KCOORD_PROFILE="p", **cluster("here"))
    eventually(lambda: packs_of(sandbox.root / "here-store", "p"))
    assert sandbox.run_kcoord(*KCOORD, "export", "p", bundle, **cluster("here")).returncode == 0
    assert sandbox.run_kcoord(*KCOORD, "import", bundle, **cluster("there")).returncode == 0
    (found,) = ranks(sandbox, 1, "plain", caches="there", **cluster("there"))
    assert work([found], "plain") == dict.fromkeys(WORK, 0)
    assert result(found) == result(true["plain"])


def start(box: Sandbox, name: str, *models: str, **wanted: Any) -> Started:
    """A rank with a world of its own, which meets the others through kcoord alone."""
    arguments = json.dumps({"models": models, "alone": True, "marks": True, **wanted})
    return box.fork(COMPILED, arguments, **environment(box, name))


def test_a_unit_is_joined_though_the_rank_that_is_at_it_was_killed(sandbox: Sandbox, true: dict[str, Outcome]) -> None:
    hold, units = sandbox.root / "hold", true["ddp"]["traces"]
    leader = start(sandbox, "leader", "ddp", hold=str(hold))
    eventually(lambda: Path(f"{hold}.began").exists() or leader.poll() is not None)
    follower = start(sandbox, "follower", "ddp")
    eventually(lambda: artifacts(sandbox) == units - 1 or follower.poll() is not None)
    leader.kill()
    leader.communicate()
    (found,) = outcomes(finish(follower, LONG))
    assert result(found) == result(true["ddp"])
    assert work([found], "ddp") == work([true["ddp"]], "ddp")


def test_a_rank_passes_over_what_another_one_is_at_and_joins_it_later(
    sandbox: Sandbox, true: dict[str, Outcome]
) -> None:
    hold, units = sandbox.root / "hold", true["ddp"]["traces"]
    leader = start(sandbox, "leader", "ddp", hold=str(hold))
    eventually(lambda: Path(f"{hold}.began").exists() or leader.poll() is not None)
    follower = start(sandbox, "follower", "ddp")
    eventually(lambda: artifacts(sandbox) == units - 1 or follower.poll() is not None)
    hold.touch()
    first, second = (outcomes(finish(process, LONG))[0] for process in (leader, follower))
    assert (first["traces"], second["traces"]) == (1, units - 1)
    assert result(first) == result(second) == result(true["ddp"])


def in_turn(box: Sandbox, rank: int, hold: Path | None = None, **settings: Any) -> Started:
    """A rank of two, which needs each unit before it goes on. `hold`: its first code generation waits. `settings`: Inductor's."""
    arguments = {"models": ["plain"], "alone": True, "marks": True, "settings": settings}
    arguments |= {"hold": str(hold)} if hold else {}
    world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    return box.fork(COMPILED, json.dumps(arguments), **world, **environment(box, f"rank{rank}"))


def a_follower_that_has_compiled_the_backward(box: Sandbox, hold: Path) -> tuple[Started, Started]:
    """The lead, which is held as it generates the code of the forward, and the follower."""
    leader = in_turn(box, 0, hold)
    eventually(lambda: Path(f"{hold}.began").exists() or leader.poll() is not None)
    follower = in_turn(box, 1)
    eventually(lambda: artifacts(box) == 1 or follower.poll() is not None)
    return leader, follower


def test_a_rank_that_finds_a_unit_under_way_compiles_its_backward_while_the_lead_compiles_its_forward(
    sandbox: Sandbox, true: dict[str, Outcome]
) -> None:
    hold = sandbox.root / "hold"
    started = a_follower_that_has_compiled_the_backward(sandbox, hold)
    hold.touch()
    found = [outcomes(finish(process, LONG))[0] for process in started]
    assert [(each["traces"], each["codegens"]) for each in found] == [(1, 1), (1, 1)]
    assert [result(each) for each in found] == [result(true["plain"])] * 2
    (later,) = ranks(sandbox, 1, "plain", caches="later")  # the unit is whole, though two ranks made it
    assert work([later], "plain") == dict.fromkeys(WORK, 0)
    for rank in (0, 1):  # and torch's own cache of each has it with its graphs
        (again,) = outcomes(finish(in_turn(sandbox, rank), LONG))
        assert work([again], "plain") == dict.fromkeys(WORK, 0), rank


def test_a_unit_with_cuda_graphs_is_waited_for_whole(sandbox: Sandbox, true: dict[str, Outcome]) -> None:
    """A backward that takes none would keep the forward from one, if it were compiled first."""
    hold, graphs = sandbox.root / "hold", {"triton.cudagraphs": True}
    leader = in_turn(sandbox, 0, hold, **graphs)
    eventually(lambda: Path(f"{hold}.began").exists() or leader.poll() is not None)
    follower = in_turn(sandbox, 1, **graphs)
    eventually(
        lambda: any(each["waiting"] for each in as_json(sandbox, "status")["flights"]) or follower.poll() is not None
    )
    hold.touch()
    found = [outcomes(finish(process, LONG))[0] for process in (leader, follower)]
    assert [each.get("traces", 0) for each in found] == [1, 0]
    assert [result(each) for each in found] == [result(true["plain"])] * 2


def test_a_rank_compiles_the_forward_itself_when_the_lead_of_the_unit_was_killed(
    sandbox: Sandbox, true: dict[str, Outcome]
) -> None:
    leader, follower = a_follower_that_has_compiled_the_backward(sandbox, sandbox.root / "hold")
    leader.kill()
    leader.communicate()
    (found,) = outcomes(finish(follower, LONG))
    assert found["codegens"] == 2
    assert result(found) == result(true["plain"])


def artifacts(box: Sandbox) -> int:
    from kcoord.artifacts.catalog import local_manifests

    return len(list(local_manifests(box.local)))


def test_a_refused_unit_fails_its_own_rank_and_is_compiled_by_the_one_that_joins_it(
    sandbox: Sandbox, true: dict[str, Outcome]
) -> None:
    hold = sandbox.root / "hold"
    leader = start(sandbox, "leader", "ddp", hold=str(hold), refuse=True)
    eventually(lambda: Path(f"{hold}.began").exists() or leader.poll() is not None)
    follower = start(sandbox, "follower", "ddp")
    eventually(lambda: artifacts(sandbox) > 0 or follower.poll() is not None)
    hold.touch()
    refused = finish(leader, LONG)
    assert refused.returncode != 0
    assert "no such operator" in refused.stderr
    (found,) = outcomes(finish(follower, LONG))
    assert result(found) == result(true["ddp"])


def test_a_setting_under_which_ranks_talk_while_they_compile_is_named_and_nothing_is_shared(
    sandbox: Sandbox, true: dict[str, Outcome]
) -> None:
    done = finish(start(sandbox, "one", "plain", settings={"distributed_max_autotune_gemm": True}), LONG)
    (found,) = outcomes(done)
    assert result(found) == result(true["plain"])
    assert done.stderr.count("distributed_max_autotune_gemm is set") == 1
    assert artifacts(sandbox) == 0


def test_ranks_that_load_the_same_kernels_at_once_write_them_once(sandbox: Sandbox) -> None:
    """Else each writes them, and what comes too late stays there under a name that nobody knows."""
    arrivals, kernels = sandbox.root / "arrivals", sandbox.root / "kernels"
    arrivals.mkdir()
    ranks = [
        sandbox.fork(PROGRAMS / "emit.py", arrivals, "3", TRITON_CACHE_DIR=str(kernels), **environment(sandbox, "emit"))
        for _ in range(3)
    ]
    done = [finish(rank, LONG) for rank in ranks]
    assert [each.returncode for each in done] == [0, 0, 0], done
    assert not [each.stderr for each in done if "skipping" in each.stderr]
    assert {path.name for path in kernels.iterdir()} == {f"KERNEL{number}" for number in range(20)}


_ATTENDS = """
import sys, torch
from torch._dynamo.utils import counters
import kcoord
kcoord.install()
torch._inductor.config.fallback_by_default = True  # no C++ to build
torch.backends.cuda.enable_flash_sdp(sys.argv[1] == "flash")
x = torch.ones(1, 2, 16, 8)
torch.compile(torch.nn.functional.scaled_dot_product_attention)(x, x, x, is_causal=True)
print(counters["aot_autograd"]["autograd_cache_hit"])
"""


def test_neither_kcoord_nor_torch_finds_a_unit_with_attention_that_is_switched_off_now(sandbox: Sandbox) -> None:
    """Torch's key does not hold the switch."""

    def hits(attention: str, caches: str) -> int:
        done = sandbox.run_forked("-c", _ATTENDS, attention, timeout=LONG, **environment(sandbox, caches))
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    assert [hits("flash", "torch"), hits("none", "torch"), hits("flash", "torch")] == [0, 0, 1]
    assert [hits("flash", "other"), hits("none", "other")] == [1, 1]
