"""Shared choices of Triton's autotuner: real processes, real compiles, measurements that differ between ranks on purpose."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import itertools
import json
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest

from kcoord.artifacts import local
from kcoord.artifacts.choices import LARGEST_CHOICE, node_decided, store_decided
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.manifest import MANIFEST_NAME
from kcoord.errors import KcoordError
from kcoord.keys.cache_key import CacheKey
from kcoord.packs.recipe import CHOICE, TRIED, Recipe
from kcoord.packs.recipe_files import load_profile, save_part
from kcoord.protocol.messages import Measurements
from kcoord.rank.coordinator import Coordinator
from kcoord.settings import Settings
from tests.support import toolchain
from tests.support.interpose import Interposer, build, find_compiler
from tests.support.living import agents_of
from tests.support.sandbox import PROGRAMS, WITH_TRITON, Sandbox, Started, eventually, finish, sandboxed

triton = pytest.importorskip("triton")
from triton.testing import do_bench  # noqa: E402 - after it is known to be there

TUNED = PROGRAMS / "tuned.py"
_gates = itertools.count()


def rank(sandbox: Sandbox, prefers: int, *arguments: str, node: str = "local", **more: str | None) -> Any:
    home = sandbox.root / node
    toolchain.share(home)
    environment = {
        "PREFERS": str(prefers),
        "KCOORD_LOCAL_DIR": str(home),
        "TRITON_CACHE_MANAGER": "kcoord.backends.triton.cache_manager:TritonCacheManager",
        "TRITON_CACHE_DIR": str(home / "triton"),
        "CUDA_VISIBLE_DEVICES": "",  # its GPU is made up: one that torch sees here is another model
        **more,
    }
    return sandbox.fork(TUNED, *arguments, preload=WITH_TRITON, **environment)


def said(process: Started) -> dict[str, Any]:
    done = finish(process)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"stderr": done.stderr, "stdout": done.stdout}


def tune(sandbox: Sandbox, prefers: int, *arguments: str, **more: Any) -> dict[str, Any]:
    return said(rank(sandbox, prefers, *arguments, **more))


@contextlib.contextmanager
def all_tuning(sandbox: Sandbox, *starts: Callable[[str], Any]) -> Iterator[list[Any]]:
    """Ranks that have looked for a choice and found none; they go on to measure, and to offer, at the end of the block."""
    gate = sandbox.root / f"gate{next(_gates)}"
    ranks = [start(str(gate)) for start in starts]
    eventually(lambda: len(list(sandbox.root.glob(f"{gate.name}.*"))) == len(ranks) or any(r.poll() for r in ranks), 60)
    yield ranks
    gate.touch()


def choices(directory: Path) -> list[Artifact]:
    """The choices that lie in a node's local tier."""
    homes = [path.parent for path in directory.glob(f"objects/??/*/{MANIFEST_NAME}")]
    found = [artifact for artifact in map(local.open_artifact, sorted(homes)) if artifact is not None]
    return [artifact for artifact in found if artifact.key.backend == "triton-autotune"]


def coordinator_of(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch, node: str = "local", **flags: str) -> Coordinator:
    monkeypatch.setenv("KCOORD_LOCAL_DIR", str(sandbox.root / node))
    return Coordinator(Settings.from_environ(**flags))


# Ranks.


def test_ranks_of_a_node_share_the_measurements_out(sandbox: Sandbox) -> None:
    starts = [lambda gate: rank(sandbox, 64, GATE=gate) for _ in range(3)]
    with all_tuning(sandbox, *starts) as ranks:
        pass
    reports = [said(r) for r in ranks]
    assert sorted(block for r in reports for block in r["first"]) == [32, 64, 128], "each begins with another"
    assert all((r["choice"], r["launched"], r["timings"]) == (64, 64, 3) for r in reports)


class ScriptedAgent:
    """The choices of a rank whose agent gives out `given`, one after the other, and then knows `timings`."""

    def __init__(self, given: list[int], timings: list[Any]) -> None:
        self._answers = [Measurements(number) for number in given] + [Measurements(timings=timings)]
        self.asked: list[str] = []

    def next_measurement(self, digest: str, *rest: Any) -> Measurements:
        self.asked.append(digest)
        return self._answers.pop(0)


def together(agent: ScriptedAgent, runs: bool = True) -> tuple[list[int], dict[int, Any]]:
    """The configurations that a rank measures, and the measurements that it has in the end, by BLOCK."""
    from kcoord.backends.triton.measuring import Measuring

    configs = [triton.Config({"BLOCK": block}) for block in (32, 64)]
    here: list[int] = []

    def measure(config: Any) -> list[float]:
        here.append(config.kwargs["BLOCK"])
        return [float(config.kwargs["BLOCK"])] * 3

    measuring = Measuring(agent, "a digest", configs, lambda config: runs)  # type: ignore[arg-type]
    return here, {config.kwargs["BLOCK"]: measuring.timing(config, measure) for config in configs}


@pytest.mark.parametrize("theirs", [3.0, "3", [], [float("nan")] * 3, [float("-inf")] * 3, None], ids=str)
def test_measurements_that_triton_cannot_compare_are_none(theirs: Any) -> None:
    """Other ranks' are untrusted."""
    assert together(ScriptedAgent([0], [None, msgpack.packb(theirs)])) == ([32, 64], {32: [32.0] * 3, 64: [64.0] * 3})


def test_what_others_measured_is_taken_and_an_agent_that_forgets_is_asked_no_more() -> None:
    assert together(ScriptedAgent([1], [msgpack.packb([9.0] * 3), None])) == ([64], {32: [9.0] * 3, 64: [64.0] * 3})
    assert together(ScriptedAgent([1, 1, 0], [])) == ([64, 32], {32: [32.0] * 3, 64: [64.0] * 3})


def test_what_is_the_best_elsewhere_and_does_not_run_here_is_measured_here() -> None:
    assert together(ScriptedAgent([1], [msgpack.packb([9.0] * 3), None]), runs=False)[0] == [64, 32]


def test_a_fault_of_kcoords_ends_the_sharing_and_not_the_job() -> None:
    assert together(ScriptedAgent([7], []))[0] == [32, 64], "no such configuration"
    broken = SimpleNamespace(next_measurement=lambda *arguments: 1 / 0)
    assert together(broken)[0] == [32, 64]  # type: ignore[arg-type]


def test_calls_of_other_sizes_share_no_measurements() -> None:
    """A choice depends on them a little, and a measurement as much as it can."""
    from kcoord.backends.triton.choice import measured_as

    class Tensor:
        def __init__(self, *shape: int) -> None:
            self.shape = shape

        def stride(self) -> tuple[int, ...]:
            return (1,)

        def data_ptr(self) -> int:
            return 32

    key = CacheKey.of("test", "choice")
    first, second, *others = [
        measured_as(key, {"x": tensor, "n": count})
        for tensor, count in ((Tensor(4), 4), (Tensor(4), 4), (Tensor(8), 4), (Tensor(4), 8))
    ]
    assert first == second
    assert len({first, *others}) == 3
    assert not measured_as(key, {"x": SimpleNamespace(shape=1)}), "sizes that cannot be told"


def test_a_subclass_that_measures_itself_shares_no_measurements(hooked: Any) -> None:
    """Its `_bench` decides about one configuration, and must not be given another's."""

    class Own(hooked):  # type: ignore[misc]
        def _bench(self, *args: Any, config: Any, **meta: Any) -> Any:
            return super()._bench(*args, config=config, **meta)

    from kcoord.backends.triton import autotune as triton_autotune

    asked: list[Any] = []
    autotuner = made(Own)
    autotuner.nargs, autotuner.do_bench = {}, lambda kernel_call, quantiles: [1.0] * 3
    measuring = SimpleNamespace(timing=lambda *args: asked.append(args))
    tuning = SimpleNamespace(autotuner=autotuner, listed=False, measuring=measuring)
    with triton_autotune._under(tuning):  # type: ignore[arg-type]
        assert autotuner._bench(config=autotuner.configs[0]) == [1.0] * 3
    assert not asked


def test_constants_that_heuristics_compute_are_in_a_choice_s_key() -> None:
    """A configuration that was chosen for a small head must not meet a large one."""
    import types

    import triton

    from kcoord.backends.triton import choice

    configs = {choice.config_digest(config): config for config in (triton.Config({"B": b}) for b in (64, 128))}

    @triton.jit
    def kernel(X, N, D, B: triton.language.constexpr, BD: triton.language.constexpr):  # type: ignore[no-untyped-def]
        pass

    def key(rule: Any, length: int) -> str:
        tuner = triton.autotune(list(configs.values()), key=["N"])(triton.heuristics({"BD": rule})(kernel))
        tensor = types.SimpleNamespace(dtype="float32")
        return choice.choice_key(tuner, (1024,), (tensor, 1024, length), {"grid": (1,)}, configs).digest

    size, other = (lambda a: triton.next_power_of_2(a["D"])), (lambda a: 16)
    assert key(size, 30) == key(size, 32)
    assert len({key(size, 32), key(size, 256), key(other, 32)}) == 3


def test_a_rank_that_comes_later_measures_nothing_and_needs_no_agent(sandbox: Sandbox) -> None:
    tune(sandbox, 128)
    later = tune(sandbox, 32, KCOORD_SPAWN="0", KCOORD_SOCKET=str(sandbox.root / "nobody"))
    assert (later["choice"], later["launched"], later["measured"]) == (128, 128, [])
    assert later["timings"] == 3, "what Triton's own cache leaves on an autotuner is there"
    assert all(h["hit"] and "BLOCK: 128" in h["best"] for h in later["heard"])


def test_a_rank_without_an_agent_tunes_as_without_kcoord(sandbox: Sandbox) -> None:
    nobody = {"KCOORD_SPAWN": "0", "KCOORD_SOCKET": str(sandbox.root / "nobody")}
    for prefers in (32, 128):
        assert tune(sandbox, prefers, **nobody)["choice"] == prefers
    assert choices(sandbox.local) == []


def test_a_rank_whose_agent_is_killed_while_it_measures_goes_on(sandbox: Sandbox) -> None:
    with all_tuning(sandbox, lambda gate: rank(sandbox, 128, GATE=gate)) as ranks:
        agents = agents_of(sandbox.processes())
        assert agents
        for agent in agents:
            agent.send_signal(signal.SIGKILL)
            agent.wait(20)
    assert said(ranks[0])["launched"] == 128
    assert tune(sandbox, 32)["choice"] == 128, "the next agent took what was offered"


def test_an_autotuner_that_existed_before_kcoord_shares_too(sandbox: Sandbox) -> None:
    tune(sandbox, 128)
    later = tune(sandbox, 32, INSTALL="after")
    assert (later["choice"], later["measured"]) == (128, [])


def test_kcoord_that_is_off_leaves_autotuners_alone(sandbox: Sandbox) -> None:
    tune(sandbox, 128)
    off = tune(sandbox, 32, KCOORD_DISABLE="1")
    assert (off["choice"], off["shared"], off["measured"]) == (32, False, [32, 64, 128])


def test_tritons_own_switches_keep_their_meaning(sandbox: Sandbox) -> None:
    first = tune(sandbox, 128, TRITON_PRINT_AUTOTUNING="1", TRITON_CACHE_AUTOTUNING="1")
    assert "best config selected: BLOCK: 128" in first["stdout"]
    assert list((sandbox.local / "triton").glob("*/add.autotune.json"))
    shutil.rmtree(sandbox.local / "objects")
    cached = tune(sandbox, 32, TRITON_CACHE_AUTOTUNING="1")
    assert (cached["choice"], cached["measured"]) == (128, []), "Triton's cache answers, and what it says is offered"
    again = tune(sandbox, 32, TRITON_ALWAYS_COMPILE="1", TRITON_PRINT_AUTOTUNING="1")
    assert (again["choice"], again["measured"]) == (128, [])
    assert "best config" not in again["stdout"], "as when Triton finds it in memory"


def test_a_kernel_of_which_no_configuration_runs_raises_tritons_exception_and_shares_nothing(sandbox: Sandbox) -> None:
    failed = tune(sandbox, 128, SHARED="-1")
    assert "out of resource" in failed["error"]
    assert choices(sandbox.local) == []


def test_a_choice_that_does_not_run_here_is_not_launched(sandbox: Sandbox) -> None:
    tune(sandbox, 128, MS="7,8")
    smaller = tune(sandbox, 32, LIMIT="64", MS="7,8")
    assert (smaller["error"], smaller["choice"], smaller["launched"]) == (None, 32, 32)
    assert smaller["measured"] == [32, 32, 64, 64, 128, 128], (
        "also for the second key, whose kernel is in memory by then"
    )
    assert "does not run on this GPU" in smaller["stderr"]


def test_a_winner_that_does_not_run_here_is_not_launched(sandbox: Sandbox) -> None:
    with all_tuning(sandbox, lambda gate: rank(sandbox, 32, GATE=gate, LIMIT="64")) as ranks:
        assert tune(sandbox, 128)["choice"] == 128
    loser = said(ranks[0])
    assert (loser["error"], loser["choice"], loser["launched"]) == (None, 32, 32)
    assert tune(sandbox, 64)["choice"] == 128


def test_a_rank_prunes_as_often_whether_it_finds_a_choice_or_not(sandbox: Sandbox) -> None:
    """Pruning may hold a collective, and ranks that count differently would hang in it."""
    first = tune(sandbox, 128)
    assert (first["pruned"], tune(sandbox, 32)["pruned"]) == ([7], [7])


def test_an_interrupted_measurement_shares_nothing_and_the_next_launch_tunes(sandbox: Sandbox) -> None:
    again = tune(sandbox, 128, INTERRUPT="1")
    assert (again["choice"], again["measured"]) == (128, [32, 64, 128])
    assert tune(sandbox, 32)["choice"] == 128


def test_a_kernel_that_is_only_compiled_shares_nothing(sandbox: Sandbox) -> None:
    """Triton measures all the same, and nothing runs."""
    script = (
        "import sys, kcoord; kcoord.install(); sys.path.insert(0, sys.argv[1]); import tuned\n"
        "tuned.driver.set_active(tuned.Gpu())\n"
        "tuned.add.run(tuned.Tensor(), None, None, 1024, 7, WIDTH=1, grid=(1,), warmup=True)\n"
        "print(tuned.add.best_config.kwargs['BLOCK'])\n"
    )
    done = sandbox.run("-c", script, PROGRAMS, PREFERS="128", TRITON_CACHE_DIR=str(sandbox.local / "triton"))
    assert (done.returncode, done.stdout.split()) == (0, ["128"]), done.stderr
    assert choices(sandbox.local) == []


# What the choice depends on.


def test_a_choice_of_something_else_is_not_used(sandbox: Sandbox) -> None:
    """`WIDTH` is a constant that is not in the tuning key, `N` changes what pruning leaves, `OPTION` is one of two tensors:
    Triton's tuning key counts them, and does not say which they are."""
    tune(sandbox, 128, OPTION="y")
    changes = {"BLOCKS": "32,64,128,256", "WIDTH": "2", "N": "100", "TRITON_DISABLE_LINE_INFO": "1", "OPTION": "z"}
    for number, (name, value) in enumerate(changes.items(), 2):
        other = tune(sandbox, 32, **{"OPTION": "y", name: value})
        assert (other["choice"], bool(other["measured"])) == (32, True), name
        assert len(choices(sandbox.local)) == number


def test_the_order_of_configurations_is_no_part_of_the_key(sandbox: Sandbox) -> None:
    tune(sandbox, 128)
    assert tune(sandbox, 32, BLOCKS="128,32,64")["measured"] == []


def test_gpus_of_one_target_and_two_models_choose_for_themselves(sandbox: Sandbox) -> None:
    pytest.importorskip("torch")  # which knows the model
    assert tune(sandbox, 128, MODEL="NVIDIA H100 80GB HBM3")["choice"] == 128
    assert tune(sandbox, 32, MODEL="NVIDIA H200")["choice"] == 32
    models = {f.text for a in choices(sandbox.local) for f in a.key.factors if f.name == "device_model"}
    assert {text.partition(",")[0] for text in models} == {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}


def test_a_benchmark_function_of_your_own_may_wait_for_other_ranks() -> None:
    """A rank that finds the choice would leave those waiting that measure in step."""
    import functools

    from kcoord.backends.triton.choice import waits

    def own(kernel_call: Any, quantiles: Any) -> Any:
        return do_bench(kernel_call, quantiles=quantiles)

    def why(bench: Any) -> str:
        return waits(triton.autotune([], [], do_bench=bench)(triton.jit(kernel)))

    assert not why(do_bench)
    assert not why(functools.partial(do_bench, warmup=1))
    assert "may wait for other ranks" in why(own)
    assert "may wait for other ranks" in why(functools.partial(do_bench, grad_to_none=[own]))


# Nodes.


def test_two_nodes_with_one_store_end_with_the_stores_choice(sandbox: Sandbox) -> None:
    store = {"KCOORD_STORE": str(sandbox.root / "store")}
    starts = [
        lambda gate, p=p, n=n: rank(sandbox, p, node=n, GATE=gate, **store) for p, n in ((32, "one"), (128, "two"))
    ]
    with all_tuning(sandbox, *starts) as ranks:
        pass
    reports = [said(r) for r in ranks]
    assert all(r["measured"] for r in reports)
    assert len({r["launched"] for r in reports}) == 1
    (one,), (two,) = choices(sandbox.root / "one"), choices(sandbox.root / "two")
    assert one.path == store_decided(sandbox.root / "one", one.key.digest)
    assert local.read_contents(one) == local.read_contents(two), "a loser's choice is in no local tier"
    third = tune(sandbox, 64, node="three", **store)
    assert (third["choice"], third["measured"]) == (reports[0]["choice"], [])


def test_what_a_node_chose_without_a_store_yields_to_the_stores_choice(sandbox: Sandbox) -> None:
    store = {"KCOORD_STORE": str(sandbox.root / "store")}
    assert tune(sandbox, 32, node="one")["choice"] == 32
    assert tune(sandbox, 128, node="two", **store)["choice"] == 128
    end_agents(sandbox)
    assert tune(sandbox, 64, node="one", **store)["choice"] == 128


def test_what_a_node_chose_without_a_store_is_what_it_offers_to_one(sandbox: Sandbox) -> None:
    store = {"KCOORD_STORE": str(sandbox.root / "store")}
    tune(sandbox, 32, node="one")
    end_agents(sandbox)
    again = tune(sandbox, 64, node="one", **store)
    assert (again["choice"], again["measured"]) == (32, [])
    assert tune(sandbox, 128, node="two", **store)["choice"] == 32


def end_agents(sandbox: Sandbox) -> None:
    """They have their settings from the rank that started them."""
    for process in sandbox.processes():
        process.terminate()
    eventually(lambda: not sandbox.processes())


def test_a_store_that_cannot_be_written_leaves_the_choice_on_its_node(sandbox: Sandbox) -> None:
    store = sandbox.root / "store"
    with all_tuning(sandbox, lambda gate: rank(sandbox, 128, GATE=gate, KCOORD_STORE=str(store))) as ranks:
        shutil.rmtree(store / "v2" / "staging")
        (store / "v2" / "staging").write_text("in the way, also of root")
    first = said(ranks[0])
    assert first["launched"] == 128
    assert "artifacts stay on this node" in first["stderr"]
    assert tune(sandbox, 32, KCOORD_STORE=str(store))["choice"] == 128
    (kept,) = choices(sandbox.local)
    assert kept.path == node_decided(sandbox.local, kept.key.digest), "it is not taken for the store's"


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler: apt install gcc")
def test_a_store_that_hangs_holds_a_rank_for_no_longer_than_an_agent_may(sandbox: Sandbox, tmp_path: Path) -> None:
    tune(sandbox, 128, node="elsewhere")
    (chosen,) = choices(sandbox.root / "elsewhere")
    store = sandbox.root / "store"
    interposer = Interposer(build(tmp_path), tmp_path)
    interposer.stall("open", below=store / "v2" / "objects" / chosen.key.digest[:2], seconds=8)
    report = tune(sandbox, 32, KCOORD_STORE=str(store), KCOORD_AGENT_TIMEOUT="1", **interposer.environ)
    assert (report["choice"], report["measured"]) == (32, [32, 64, 128])
    again = tune(sandbox, 64, KCOORD_STORE=str(store), KCOORD_AGENT_TIMEOUT="1", **interposer.environ)
    assert again["choice"] == 32, "the node agrees"


@pytest.mark.parametrize(
    "garbage",
    [b"\xc1", b"\x82\xa6format\x01\xa6config\xa3all"],
    ids=["no msgpack", "another configuration"],
)
def test_a_choice_that_is_none_of_the_configurations_is_ignored(
    sandbox: Sandbox, garbage: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune(sandbox, 128, node="elsewhere")
    (chosen,) = choices(sandbox.root / "elsewhere")
    coordinator = coordinator_of(sandbox, monkeypatch)
    assert coordinator.choices.offer(chosen.key, garbage, 0.0) == garbage
    coordinator.close()
    report = tune(sandbox, 32)
    assert (report["choice"], report["launched"], report["measured"]) == (32, 32, [32, 64, 128])
    assert "the shared choice is none of its configurations" in report["stderr"]


def test_a_choice_that_is_too_large_stays_with_its_rank(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = coordinator_of(sandbox, monkeypatch)
    assert coordinator.choices.offer(CacheKey.of("test", "large"), b"x" * (LARGEST_CHOICE + 1), 0.0) is None
    assert any("too large" in line for line in coordinator.notices.since(0)[0])


# The autotuner itself.


@pytest.fixture
def hooked() -> Iterator[Any]:
    """Triton's class of autotuners, hooked in this process for one test."""
    from triton.runtime.autotuner import Autotuner

    from kcoord.backends.triton import autotune as triton_autotune

    stock = Autotuner.check_disk_cache
    was = hasattr(stock, "__kcoord_stock__")
    triton_autotune.hook()
    yield Autotuner
    if not was:
        Autotuner.check_disk_cache = stock
        del Autotuner.cache_results


def kernel(x, BLOCK: triton.language.constexpr):
    pass


def made(kind: Any, **more: Any) -> Any:
    configs = [triton.Config({"BLOCK": block}) for block in (32, 64)]
    return kind(triton.jit(kernel), ["x", "BLOCK"], configs, [], None, None, **more)


def test_an_autotuner_and_its_cache_its_copies_and_pickles_are_plain(hooked: Any) -> None:
    config = triton.Config({"BLOCK": 64}, num_warps=2)
    autotuner = made(hooked)
    autotuner.cache[7, "fp32"] = config
    assert autotuner.cache_results, "it is asked before it measures"
    for other in (copy.copy(autotuner), copy.deepcopy(autotuner.cache), pickle.loads(pickle.dumps(autotuner.cache))):
        found = getattr(other, "cache", other)
        assert type(found) is dict
        assert list(found) == [(7, "fp32")]
    assert vars(autotuner)["cache_results"] is False, "what the user set, for whoever reads a copy without kcoord"


def test_a_subclass_that_looks_for_choices_itself_is_left_alone(hooked: Any) -> None:
    class Own(hooked):  # type: ignore[misc]
        def check_disk_cache(self, tuning_key: Any, configs: Any, bench_fn: Any) -> bool:
            raise AssertionError("it was not to be asked")

    assert not made(Own).cache_results
    assert made(Own, cache_results=True).cache_results


def test_a_kernel_whose_ranks_may_wait_for_each_other_is_tuned_by_each_for_itself(tmp_path: Path) -> None:
    """One that finds a choice would leave those waiting that measure."""
    from kcoord.backends.triton.choice import waits

    source = (
        "import triton, triton.language as tl\n"
        "@triton.jit\ndef barrier(x):\n    tl.atomic_add(x, 1, scope='sys')\n"
        "@triton.jit\ndef alone(x, BLOCK: tl.constexpr):\n    tl.atomic_add(x, 1)\n"
        "@triton.jit\ndef together(x, BLOCK: tl.constexpr):\n    barrier(x)\n"
    )
    (tmp_path / "in_step.py").write_text(source)
    spec = importlib.util.spec_from_file_location("in_step", tmp_path / "in_step.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert not waits(triton.autotune([], [])(module.alone))
    assert "communicate with other GPUs" in waits(triton.autotune([], [])(module.together))


IN_STEP = """
import sys, kcoord
kcoord.install()
sys.path.insert(0, sys.argv[1])
import tuned

def in_step(kernel_call, quantiles):
    return tuned.measure(kernel_call, quantiles)  # and a barrier

tuned.driver.set_active(tuned.Gpu())
configs = [tuned.triton.Config({"BLOCK": block}) for block in tuned.BLOCKS]
add = tuned.triton.autotune(configs, ["m"], do_bench=in_step, cache_results=True)(tuned.add.fn)
add[(1,)](tuned.Tensor(), None, None, 1024, 7, WIDTH=1)
print(tuned.measured)
"""


@pytest.mark.parametrize("world", ["2", "1"])
def test_a_tuner_whose_ranks_may_wait_for_each_other_is_answered_by_tritons_disk_cache_on_no_rank(
    sandbox: Sandbox, world: str
) -> None:
    """A rank on a node that has tuned before would leave the others waiting in their first measurement."""
    measured = []
    for _ in range(2):
        home = str(sandbox.local / "triton")
        ranks = {"RANK": "0", "WORLD_SIZE": world, "TRITON_CACHE_DIR": home}
        done = sandbox.run("-c", IN_STEP, PROGRAMS, **ranks)
        assert done.returncode == 0, done.stderr
        measured.append(json.loads(done.stdout))
    assert measured == [[32, 64, 128], [32, 64, 128] if world == "2" else []]


# Profiles.


@pytest.fixture(scope="module")
def recorded() -> Iterator[list[Recipe]]:
    """The profile of a job that has tuned: its choice, and the three kernels that it tried."""
    with sandboxed() as box:
        tune(box, 128, node="first", KCOORD_PROFILE="job")
        settings = Settings.from_environ({"KCOORD_LOCAL_DIR": str(box.root / "first")})
        found: list[Recipe] = []

        def is_there() -> bool:
            with contextlib.suppress(KcoordError):
                found[:] = load_profile(settings, "job")
            return len(found) == 4

        eventually(is_there, what="the profile was written")
        yield found


@pytest.fixture
def profile(recorded: list[Recipe]) -> list[Recipe]:
    return [recipe for recipe in recorded if recipe.backend == CHOICE]


def test_a_choice_is_recorded_and_replayed_where_nobody_has_tuned(sandbox: Sandbox, profile: list[Recipe]) -> None:
    (recipe,) = profile
    assert (recipe.module, recipe.qualname, recipe.target) == ("triton-autotune", "add", "")
    save_part(sandbox.local / "profiles" / "job", profile)
    report = tune(sandbox, 32, "warm", PROFILE="job")
    assert (report["choice"], report["measured"]) == (128, [])
    assert report["report"]["failed"] == []


def test_a_recorded_choice_holds_for_whoever_asks_for_its_key(sandbox: Sandbox, profile: list[Recipe]) -> None:
    save_part(sandbox.local / "profiles" / "job", profile)
    report = tune(sandbox, 32, KCOORD_PROFILE="job")
    assert (report["choice"], report["measured"]) == (128, [])


def test_what_was_only_tried_comes_after_all_that_the_job_used(recorded: list[Recipe]) -> None:
    kernels = [recipe for recipe in recorded if recipe.backend == "triton"]
    assert len(kernels) == 3
    (used,) = [str(recipe.call["constants"]) for recipe in kernels if recipe.order < TRIED]
    assert "128" in used


def test_a_choice_of_a_kernel_that_has_changed_is_skipped_without_noise(
    sandbox: Sandbox, profile: list[Recipe]
) -> None:
    save_part(sandbox.local / "profiles" / "job", profile)
    report = tune(sandbox, 32, "warm", PROFILE="job", BLOCKS="32,64")
    assert (report["choice"], report["measured"]) == (32, [32, 64])
    assert (report["report"]["failed"], report["report"]["compiled"]) == ([], 0)
    report = tune(sandbox, 32, "warm", node="other", PROFILE="job", TRITON_DISABLE_LINE_INFO="1")
    assert report["measured"] == [32, 64, 128]


def test_a_recipe_of_a_choice_that_is_none_is_reported(sandbox: Sandbox) -> None:
    bad = Recipe(CHOICE, "triton-autotune", "add", {"content": 1}, "", 0.0, 1)
    save_part(sandbox.local / "profiles" / "job", [bad])
    report = tune(sandbox, 32, "warm", PROFILE="job")
    assert report["choice"] == 32
    assert len(report["report"]["failed"]) == 1
