"""A unit on one GPU: ranks with other GPUs have its key, and its graphs are moved to their GPUs."""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

from torch._functorch import config as functorch  # noqa: E402
from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCachePickler  # noqa: E402
from torch._inductor import config as inductor  # noqa: E402
from torch._inductor.async_compile import CompiledTritonKernels  # noqa: E402
from torch._inductor.codecache import FxGraphCachePickler  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.testing._internal.two_tensor import TwoTensor  # noqa: E402

from kcoord.backends import reliances  # noqa: E402
from kcoord.backends.inductor import hooks, moving  # noqa: E402
from kcoord.backends.inductor.compiles import OpenCompile  # noqa: E402
from kcoord.backends.inductor.request import GRAPH, UNIT  # noqa: E402
from kcoord.settings import Settings  # noqa: E402

CODE = """
# %x : Tensor "f32[4][1]cuda:{gpu}" = full(args = (4,), kwargs = {{device: cuda:{gpu}}})
triton_0 = async_compile.triton('triton_0', '''
    triton_meta={{'device': DeviceProperties(type='cuda', index={gpu}, cc=90), 'configs': [{{(0,): 0, (1,): 1}}]}}
    text = 'a\\\\nb'
''', device_str='cuda')
async_compile.wait(globals())
def call(args):
    with torch.cuda._DeviceGuard({gpu}):
        torch.cuda.set_device({gpu})
        buf0 = empty_strided_cuda((0, 1), (1, 0), torch.float32)
        raw_stream0 = get_raw_stream({gpu})
        triton_0.run(buf0, 0, 1, stream=raw_stream0)
        torch.ops.aten.full.out([0], 1, device=device(type='cuda', index={gpu}), out=buf0)
        state = torch.cuda.default_generators[{gpu}].graphsafe_get_state()
"""
KERNEL = """
    triton_meta={{'device': DeviceProperties(type='cuda', index={gpu}, cc=90), 'configs': [{{(0,): 0, (1,): 1}}]}}
    text = 'a\\nb'
"""


class Properties(NamedTuple):
    type: str
    index: int  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Files:
    device: int


@dataclasses.dataclass(frozen=True)
class Tuner:
    cache_key: str
    kernel: Any


@dataclasses.dataclass(frozen=True)
class Bundle:
    kernel_artifacts: list[Any]
    static_autotuners: list[Any]


def stored(code: str = CODE.format(gpu=0), gpus: tuple[int, ...] = (0,), **more: Any) -> Any:
    """A graph as torch keeps it, of a rank on GPU 0."""
    results = [SimpleNamespace(compile_meta={"device": 0})]
    kernel = SimpleNamespace(device_props=Properties("cuda", 0), triton_meta={"device": 0}, compile_results=results)
    bundle = Bundle(
        [Files(0)], [Tuner(CompiledTritonKernels.key(KERNEL.format(gpu=0)), kernel), Tuner("of no kernel", kernel)]
    )
    content = {
        "source_code": code,
        "cache_key": "of 0",
        "device_idxs": set(gpus),
        "constants": None,
        "_triton_bundle": bundle,
    }
    return SimpleNamespace(**content | more)


def moved(entry: Any, kind: str = GRAPH, gpu: int | None = 3) -> Any:
    with OpenCompile(UNIT, gpu=gpu):
        return moving.moved(kind, entry)


def test_a_moved_graph_names_this_ranks_gpu_alone() -> None:
    found = moved(stored())
    assert (found.source_code, found.device_idxs) == (CODE.format(gpu=3), {3})
    assert found.cache_key != "of 0"  # torch loads the file of this name
    assert found._triton_bundle.kernel_artifacts == [Files(3)]
    (tuner,) = found._triton_bundle.static_autotuners
    assert tuner.kernel.device_props.index == tuner.kernel.triton_meta["device"] == 3
    assert tuner.kernel.compile_results[0].compile_meta["device"] == 3


def test_moved_code_finds_the_kernels_that_its_graph_was_stored_with_and_no_other_code_does() -> None:
    """A process that has the graph on two GPUs would launch the kernels of one on the other."""
    (tuner,) = moved(stored())._triton_bundle.static_autotuners
    assert (
        tuner.cache_key
        == CompiledTritonKernels.key(KERNEL.format(gpu=3))
        != CompiledTritonKernels.key(KERNEL.format(gpu=0))
    )


@pytest.mark.parametrize("gpu", [None, 0])
def test_a_graph_is_left_as_it_is_on_its_own_gpu_and_where_keys_hold_the_index(gpu: int | None) -> None:
    graph = stored()
    assert moved(graph, gpu=gpu) is graph
    assert (graph.source_code, graph.cache_key) == (CODE.format(gpu=0), "of 0")


CONSTANT = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
DOUBTFUL: dict[str, dict[str, Any]] = {
    "a second GPU in the code": {"code": CODE.format(gpu=0) + "device='cuda:7'"},
    "a second GPU that the code does not name": {"gpus": (0, 1)},
    "another word for a GPU": {"code": CODE.format(gpu=0) + "launch(device_index=0)"},
    "a kernel that is not Triton's": {"code": CODE.format(gpu=0) + "k = async_compile.cutedsl('k', '''''')"},
    "a constant on the other GPU": {"constants": {"_tensor_constant0": CONSTANT}},
    "the FX graph beside the code": {"_serialized_original_gm": b"cuda:0"},
    "a bundle of another torch": {"_triton_bundle": SimpleNamespace()},
}


@pytest.mark.parametrize("content", DOUBTFUL.values(), ids=DOUBTFUL)
def test_a_graph_is_not_found_that_may_name_another_gpu(content: dict[str, Any]) -> None:
    assert moved(stored(**content)) is None


def unit(generator: int | None = None, code: str = "") -> Any:
    backward = SimpleNamespace(args=({"_code": code}, "imports")) if code else None
    return SimpleNamespace(
        runtime_metadata=SimpleNamespace(graphsafe_rng_state_index=generator), serialized_bw_module=backward
    )


def test_a_unit_draws_random_numbers_of_this_ranks_gpu() -> None:
    """A recomputed dropout has the generator's index beside its graphs."""
    assert moved(unit(generator=0), UNIT).runtime_metadata.graphsafe_rng_state_index == 3
    assert moved(unit(), UNIT).runtime_metadata.graphsafe_rng_state_index is None


def test_the_backward_that_a_unit_keeps_for_compiled_autograd_is_moved() -> None:
    code = "torch.full([4], 1, device = device(type='cuda', index={}))"
    assert moved(unit(code=code.format(0)), UNIT).serialized_bw_module.args[0]["_code"] == code.format(3)
    assert moved(unit(code=code.format(0) + code.format(1)), UNIT) is None


def test_torch_is_told_of_a_miss_if_what_it_found_cannot_be_moved() -> None:
    found = (stored(gpus=(0, 1)), b"content", {"cache_status_detailed": "hit"})
    with OpenCompile(UNIT, gpu=3):
        assert hooks._lookup(GRAPH, lambda *arguments: found, "fkey", True, None, lambda *a: True, [])[:2] == (
            None,
            None,
        )


# Keys.


@pytest.fixture(scope="module")
def hooked() -> Iterator[None]:
    natives = [(owner, name, getattr(owner, name)) for owner, name in map(hooks.MOVING.place, hooks._MOVING)]
    assert hooks._wrap(hooks.MOVING, hooks._MOVING)
    yield
    for owner, name, native in natives:
        setattr(owner, name, native if isinstance(owner, type(torch)) or "key" not in name else staticmethod(native))


def content(pickler: Any, gpu: int | None, index: int) -> bytes:
    there = torch.device("cuda", index)
    inner, nodes = torch.fx.Graph(), torch.fx.Graph()
    inner.output(inner.call_function(torch.ones, (4,), {"device": str(there)}))
    called = nodes.call_module("inner")
    nodes.output((called, nodes.call_function(torch.ones, (4,), {"device": there})))
    graph = torch.fx.GraphModule({"inner": torch.fx.GraphModule({}, inner)}, nodes)
    for each in (graph, graph.inner):
        each.meta.clear()
    details = SimpleNamespace(gm=graph, device=there)
    with OpenCompile(UNIT, gpu=gpu):
        return bytes(pickler(graph).dumps(details))


@pytest.mark.parametrize("pickler", [FxGraphCachePickler, AOTAutogradCachePickler])
def test_keys_say_this_gpu_for_a_unit_that_is_on_it(hooked: None, pickler: Any) -> None:
    assert content(pickler, 0, 0) == content(pickler, 1, 1) == content(pickler, 10, 10)
    assert content(pickler, 0, 0) != content(pickler, 0, 1)  # another one
    assert content(pickler, None, 0) != content(pickler, None, 1)
    assert content(pickler, 0, 0) != content(pickler, None, 0)  # which torch would find without kcoord


def test_a_stored_constant_comes_to_this_gpu(hooked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    places = []
    monkeypatch.setattr(
        torch.serialization, "default_restore_location", lambda found, place: places.append(place) or found
    )
    with io.BytesIO() as stream:
        torch.save(torch.ones(2)._typed_storage(), stream, _use_new_zipfile_serialization=False)
        written = stream.getvalue()
    with OpenCompile(UNIT, gpu=2):
        for place in (b"cpu", b"cuda:0"):
            length = b"X" + len(place).to_bytes(4, "little")
            torch.storage._load_from_bytes(written.replace(b"X\x03\x00\x00\x00cpu", length + place))
    assert places == ["cpu", "cuda:2"]
    assert pickle.loads(pickle.dumps(torch.ones(2))).tolist() == [1, 1]  # outside a compile: as torch does


# Units that are moved.


@pytest.fixture
def current(hooked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """This thread's GPU is the second one, and kcoord is in use."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(moving, "coordinator_in_use", lambda: SimpleNamespace(settings=Settings()))


def on(*places: str) -> list[Any]:
    with FakeTensorMode():
        return [torch.empty(4, device=place) for place in places]


def between(place: str) -> Any:
    """A unit with an intermediate value there."""
    nodes = torch.fx.Graph()
    node = nodes.call_function(torch.ones, (4,))
    node.meta["example_value"] = (on(place)[0],)
    nodes.output(node)
    return torch.fx.GraphModule({}, nodes)


@pytest.mark.usefixtures("current")
class TestUnits:
    def test_a_unit_on_this_threads_gpu_and_the_cpu_is_on_this_gpu(self) -> None:
        assert moving.gpu_of(between("cpu"), [*on("cuda:1", "cpu"), 7]) == 1
        assert moving.gpu_of(between("cuda:1"), []) == 1

    @pytest.mark.parametrize(
        "places",
        [
            ["cuda:0"],
            ["cuda:1", "cuda:0"],
            ["cuda:1", "cuda:2"],
            ["cuda:1", "xpu:1"],
            ["cuda:1", "xpu:0"],
            ["cpu"],
            [],
            ["xpu:1"],
        ],
    )
    def test_a_unit_elsewhere_is_not(self, places: list[str]) -> None:
        assert moving.gpu_of(between("cpu"), on(*places)) is None

    def test_a_unit_with_a_value_on_another_gpu_is_not(self) -> None:
        assert moving.gpu_of(between("cuda:0"), on("cuda:1")) is None

    @pytest.mark.parametrize(
        ("config", "switch"),
        [(inductor, "cpp_wrapper"), (inductor, "fx_wrapper"), (functorch, "bundled_autograd_cache")],
    )
    def test_only_code_in_python_that_is_kept_apart_from_its_unit_is_moved(self, config: Any, switch: str) -> None:
        with config.patch({switch: True}):
            assert moving.gpu_of(between("cpu"), on("cuda:1")) is None

    def test_a_unit_with_tensors_that_are_made_of_others_is_not_moved(self) -> None:
        with FakeTensorMode():
            pair = TwoTensor(torch.empty(4, device="cuda:1"), torch.empty(4, device="cuda:1"))
        assert moving.gpu_of(between("cpu"), [pair]) is None

    def test_kcoord_move_0_switches_it_off(self, monkeypatch: pytest.MonkeyPatch) -> None:
        off = Settings.from_environ({"KCOORD_MOVE": "0"})
        monkeypatch.setattr(moving, "coordinator_in_use", lambda: SimpleNamespace(settings=off))
        assert moving.gpu_of(between("cpu"), on("cuda:1")) is None

    def test_a_rank_says_that_the_index_is_in_the_key_only_where_it_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[Any] = []
        monkeypatch.setattr(hooks, "_tell_of_devices", told.append)
        seen: list[int | None] = []
        for place in ("cuda:1", "cuda:0"):
            hooks._unit(lambda *arguments: seen.append(hooks.compiles.gpu()), None, between("cpu"), on(place))
        assert (seen, len(told)) == ([1, None], 1)

    def test_a_unit_that_is_not_shared_is_not_moved(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(hooks, "_problem", lambda *arguments: "its graph calls an operator of the user")
        seen: list[int | None] = []
        hooks._unit(lambda *arguments: seen.append(hooks.compiles.gpu()), None, between("cpu"), on("cuda:1"))
        assert seen == [None]


def test_a_graph_is_moved_where_its_unit_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []
    with OpenCompile(UNIT, "its graph calls an operator", gpu=None):
        hooks._graph(lambda *arguments: seen.append(hooks.compiles.gpu()), between("cpu"))
    with OpenCompile(UNIT, gpu=1):
        hooks._graph(lambda *arguments: seen.append(hooks.compiles.gpu()), between("cpu"))
    assert seen == [None, 1]


@pytest.mark.parametrize(
    ("release", "cuda", "hip", "hooks_it", "says"),
    [
        ("2.11.0+cu130", "13.0", None, True, 0),
        ("2.99.0", "13.0", None, False, 1),
        ("2.11.0a0+git1234", "13.0", None, False, 1),
        ("2.99.0+cpu", None, None, False, 0),
        ("2.11.0+rocm7", None, "7.0", False, 0),
    ],
)
def test_graphs_are_moved_on_releases_for_cuda_that_were_compared(
    monkeypatch: pytest.MonkeyPatch, release: str, cuda: str | None, hip: str | None, hooks_it: bool, says: int
) -> None:
    monkeypatch.setattr(reliances, "asides", asides := {})
    monkeypatch.setattr(reliances, "coordinator_in_use", lambda: None)
    monkeypatch.setattr(torch, "__version__", release)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert moving.may_hook() is hooks_it
    assert len(asides) == says
