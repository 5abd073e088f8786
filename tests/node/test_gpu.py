"""What only a GPU can show. Skipped where there is none."""

from __future__ import annotations

import json
import os
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from kcoord.packs.recipe_files import load_profile
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
    stats = sandbox.run_kcoord(*KCOORD, "stats", "--json", "--job", node, **settings)
    found: dict[str, Any] = json.loads(stats.stdout)
    return found


def test_what_a_machine_without_gpu_compiled_is_what_the_job_on_a_gpu_asks_for(sandbox: Sandbox) -> None:
    recorded = train(sandbox, "first", "--kcoord-profile", "g")
    assert recorded["compiles"] > 10
    settings = Settings.from_environ({"KCOORD_STORE": str(sandbox.root / "store")})
    eventually(lambda: len(load_profile(settings, "g")) == recorded["compiles"])
    profile = sandbox.root / "profiles"
    shutil.move(sandbox.root / "store" / "v2" / "profiles", profile)
    shutil.rmtree(sandbox.root / "store")  # nothing but the recipes is left
    (sandbox.root / "store" / "v2").mkdir(parents=True)
    shutil.move(profile, sandbox.root / "store" / "v2" / "profiles")
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
    shutil.copytree(sandbox.root / "store" / "v2" / "profiles", sandbox.root / "again" / "profiles")
    shutil.rmtree(sandbox.root / "store" / "v2" / "objects")
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


WAYS = ("cuda_graphs", "checkpointed", "accumulated", "fsdp", "tensor_parallel", "hf_trainer")
RANK_IN_GRAPH = {"tensor_parallel"}  # DTensor's mesh holds the rank
ALONE = ["--virtual-local-rank"]  # each rank sees its own GPU


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 GPUs")
@pytest.mark.parametrize(
    ("flags", "later", "ways"),
    [(ALONE, [], WAYS), ([], ALONE, WAYS), ([], [], ("lightning",))],  # Lightning takes the GPU of LOCAL_RANK
    ids=["its GPU alone, then all", "all GPUs, then its own alone", "all GPUs"],
)
def test_each_way_to_train_has_stocks_losses_and_its_graphs_are_compiled_once(
    sandbox: Sandbox, flags: list[str], later: list[str], ways: tuple[str, ...]
) -> None:
    """A rank that meets a unit under way traces it, too. A later job loads all, whether its ranks see the same GPUs or not."""
    for library, way in (("transformers", "hf_trainer"), ("lightning", "lightning")):
        if way in ways:
            pytest.importorskip(library)

    def run(launcher: str, caches: str, flags: list[str]) -> dict[str, list[dict[str, Any]]]:
        done = sandbox.run(
            *("-m", launcher, "--standalone", "--nproc-per-node=2", *flags, PROGRAMS / "frameworks.py", *ways),
            timeout=400,
            OMP_NUM_THREADS="1",
            TORCHINDUCTOR_CACHE_DIR=str(sandbox.root / caches),
            KCOORD_LOCAL_DIR=str(sandbox.root / f"{caches}-local"),
            KCOORD_STORE=str(sandbox.root / "store"),
            KCOORD_STORE_CREATE="1",
        )
        assert done.returncode == 0, done.stderr
        assert "please report it" not in done.stderr
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"way"')]
        return {way: [line for line in lines if line["way"] == way] for way in ways}

    def losses(found: dict[str, list[dict[str, Any]]]) -> list[float]:
        """Nearly the same in each process, stock's too: kernels are chosen by time."""
        return [float.fromhex(loss) for way in ways for loss in sorted(chain(*(line["losses"] for line in found[way])))]

    def work(what: str, found: dict[str, list[dict[str, Any]]]) -> dict[str, int]:
        return {way: sum(line[what] for line in found[way]) for way in ways}

    stock = run("torch.distributed.run", "stock", flags)
    first, second = (run("kcoord_launch.torchrun", *each) for each in (("first", flags), ("second", later)))
    assert losses(first) == pytest.approx(losses(stock), rel=1e-3)
    assert losses(second) == pytest.approx(losses(stock), rel=1e-3)
    for way, count in work("traces", stock).items():
        of_one_rank = count if way in RANK_IN_GRAPH else count // 2
        assert of_one_rank <= work("traces", first)[way] <= count, way
        assert work("traces", second)[way] == (count if way in RANK_IN_GRAPH else 0), way
    for way, count in work("codegens", stock).items():
        if way not in RANK_IN_GRAPH:
            assert work("codegens", first)[way] == count // 2, way
            assert work("codegens", second)[way] == 0, way


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than 2 GPUs")
def test_a_process_with_a_model_on_each_of_two_gpus_computes_on_both_what_it_should(sandbox: Sandbox) -> None:
    """Whichever GPU is the current one when a model runs."""

    def run(**variables: str) -> dict[str, Any]:
        done = sandbox.run(PROGRAMS / "two_gpus.py", timeout=280, **variables)
        assert done.returncode == 0, done.stderr
        assert "please report it" not in done.stderr
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        for gpu in "01":
            eager = pytest.approx(found["found"][f"{gpu}, eager"], rel=1e-3, abs=1e-4)
            assert found["found"][f"{gpu}, its own"] == eager
            assert found["found"][f"{gpu}, the other"] == eager
        after: dict[str, Any] = found["after"]
        return after

    assert run()["1"] == {"traces": 1, "codegens": 2}  # the second model's graphs are the first one's
    assert run(KCOORD_MOVE="0", KCOORD_LOCAL_DIR=str(sandbox.root / "unmoved"))["1"] == {"traces": 2, "codegens": 4}


@pytest.mark.parametrize(("compiler", "count"), [("extension", 1), ("tilelang", 2), ("cutedsl", 1), ("ninetoothed", 1)])
def test_a_kernel_is_compiled_once_for_all_gpus_and_computes_what_it_should(
    sandbox: Sandbox, compiler: str, count: int
) -> None:
    if compiler != "extension":
        pytest.importorskip("nvidia_cutlass_dsl" if compiler == "cutedsl" else compiler)
    home = sandbox.root / "home"  # nodes have the same path, which line information may hold
    for node, compiles in (("first", count), ("second", 0)):
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        done = sandbox.run(
            *(
                "-m",
                "kcoord_launch.torchrun",
                "--standalone",
                "--nproc-per-node=2",
                PROGRAMS / "gpu_compilers.py",
                compiler,
            ),
            timeout=280,
            HOME=str(home),
            KCOORD_LOCAL_DIR=str(sandbox.root / node),
            KCOORD_STORE=str(sandbox.root / "store"),
            KCOORD_STORE_CREATE="1",
            TORCH_EXTENSIONS_DIR=str(sandbox.root / f"{node}-extensions"),
        )
        assert done.returncode == 0, done.stderr
        assert "please report it" not in done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert [each["right"] for each in found] == [True, True]
        assert sum(each["compiles"] for each in found) == compiles
        assert found[0].get("choice") == found[1].get("choice")


def test_a_compiled_step_holds_what_stocks_does_and_its_graph_may_be_retained(sandbox: Sandbox) -> None:
    """By who compiles, who finds it in torch's own cache, and who loads it."""

    def run(caches: str, *steps: str, stock: bool = False) -> list[list[Any]]:
        wanted = json.dumps({"steps": steps, "variants": ["float32", "bfloat16"]})
        variables = {"TORCHINDUCTOR_CACHE_DIR": str(sandbox.root / caches), "STOCK": "1" if stock else None}
        done = sandbox.run(PROGRAMS / "donating.py", wanted, timeout=300, **variables)
        assert done.returncode == 0, done.stderr
        assert "please report it" not in done.stderr
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]

    true = {}
    for variant, step, result in run("a", "retained", stock=True) + run("b", "once", "measured", stock=True):
        true[variant, step] = result
    for caches in ("one", "one", "another"):
        for variant, step, result in run(caches, "once", "retained", "once", "measured"):
            expected = true[variant, step]
            if step == "measured":
                assert result <= 1.02 * expected, (variant, f"{result} bytes, and stock {expected}")
            else:
                numbers = [
                    list(chain(*([n] if isinstance(n, float) else n for n in each))) for each in (result, expected)
                ]
                assert numbers[0] == pytest.approx(numbers[1], rel=0.02), (variant, step)
