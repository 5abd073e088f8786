"""Choices of Inductor's run-time tuning, with torch's own tuner around measurements that are given."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

import triton
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.runtime.autotune_cache import AutotuneCache
from torch._inductor.runtime.hints import HeuristicType
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from kcoord.backends.inductor import tuning
from kcoord.keys.cache_key import CacheKey

SLOW, FAST = 2.0, 1.0


class Shared:
    """A coordinator, as far as choices go, and its choices."""

    def __init__(self) -> None:
        self.choices = self
        self.kept: dict[str, bytes] = {}
        self.offered = threading.Semaphore(0)

    def get(self, key: CacheKey) -> bytes | None:
        return self.kept.get(key.digest)

    def offer(self, key: CacheKey, content: bytes, seconds: float, device: str) -> bytes:
        found = self.kept.setdefault(key.digest, content)
        self.offered.release()
        return found


def config(block: int, warps: int = 4) -> Any:
    return triton.Config({"XBLOCK": block}, num_warps=warps, num_stages=1)


class Launcher(SimpleNamespace):
    n_regs = n_spills = shared = 0
    cache_hash = "hash"

    def __hash__(self) -> int:
        return id(self)


class Descent:
    """Finds what no launcher has."""

    def autotune(self, measure: Any, baseline: Any, timing: float | None = None) -> Any:
        def best(descent: Any, measure: Any, baseline: Any, timing: float | None) -> Any:
            measure(config(4096, warps=8))
            return config(4096, warps=8)

        return tuning.descent(best, self, measure, baseline, timing)


class Kernel(CachingAutotuner):
    """A tuner of torch's, hooked, whose launchers take the milliseconds that `took` says, by block size."""

    def __init__(self, name: str, took: dict[int, float], descends: bool = False) -> None:
        self.fn = SimpleNamespace(__name__=name, fn=len, src="")
        self.filename = f"/somewhere/{name}.py"
        self.launchers = [Launcher(config=config(block)) for block in took]
        self.took, self.measured, self.modes = took, list[int](), set[str]()
        self.inductor_meta = {"coordinate_descent_tuning": descends}
        self.heuristic_type, self.custom_kernel, self.deterministic_mode = HeuristicType.POINTWISE, False, False
        self.compile_results, self.precompile_time_taken_ns, self.save_cache_hook = [], 0, None
        self.coordesc_tuner, self.lock, self.size_hints = Descent(), threading.Lock(), {"x": 4096}
        self.autotune_time_taken_ns, self.compile_id, self.is_backward = 0, None, False

    def benchmark_all_configs(self, *args: Any, **kwargs: Any) -> dict[Any, float]:
        return tuning.measurements(Kernel.measure, self, *args, **kwargs)

    def measure(self) -> dict[Any, float]:
        return {launcher: self.bench(launcher) for launcher in self.launchers}

    def bench(self, launcher: Any) -> float:
        block = launcher.config.kwargs["XBLOCK"]
        self.measured.append(block)
        self.modes.add(str(_get_current_dispatch_mode()))
        return self.took.get(block, FAST)

    def _precompile_config(self, config: Any) -> Any:
        return SimpleNamespace(make_launcher=lambda: Launcher(config=config))

    def _release_static_launchers_except(self, launcher: Any) -> None:
        pass

    def launch(self) -> tuple[int, int]:
        """The block size and the warps that run."""
        if len(self.launchers) > 1:
            tuning.fastest(CachingAutotuner.autotune_to_one_config, self)
        if self.inductor_meta["coordinate_descent_tuning"]:
            self.launchers = [tuning.descended(CachingAutotuner.coordinate_descent_tuning, self, self.launchers[0])]
        return self.launchers[0].config.kwargs["XBLOCK"], self.launchers[0].config.num_warps


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> Shared:
    found = Shared()
    monkeypatch.setattr(tuning, "coordinator_in_use", lambda: found)
    return found


def module(*kernels: Kernel, file: str | Path = "/somewhere/cabc.py") -> None:
    """A process whose generated module has these."""
    scope = {"__file__": str(file), **{kernel.fn.__name__: kernel for kernel in kernels}}
    tuning.kernels_ready(lambda compiles, scope: None, AsyncCompile(), scope)


def offered(shared: Shared) -> None:
    assert shared.offered.acquire(timeout=10)


def test_a_later_process_launches_what_the_first_one_measured(shared: Shared) -> None:
    first, later = Kernel("k", {64: FAST, 128: SLOW}), Kernel("k", {64: SLOW, 128: FAST})
    module(first)
    assert first.launch() == (64, 4)
    offered(shared)
    module(later)
    assert (later.launch(), later.measured) == ((64, 4), [])


def test_choices_of_a_module_are_offered_once_all_of_them_are_made(shared: Shared) -> None:
    one, other = Kernel("one", {64: FAST, 128: SLOW}), Kernel("other", {64: SLOW, 128: FAST})
    single = Kernel("single", {256: FAST})
    module(one, other, single)
    one.launch()
    assert not shared.kept
    other.launch()
    offered(shared)
    assert len(shared.kept) == 1
    later = Kernel("single", {64: FAST, 256: SLOW})  # the first process had its choice from torch's cache
    module(later)
    assert (later.launch(), later.measured) == ((256, 4), [])


def test_a_choice_that_is_none_of_the_configurations_is_measured_again(shared: Shared) -> None:
    first, later = Kernel("k", {64: FAST, 128: SLOW}), Kernel("k", {256: SLOW, 512: FAST})
    module(first)
    first.launch()
    offered(shared)
    module(later)
    assert later.launch() == (512, 4)


@pytest.mark.parametrize("content", [b"", b"\xc1", b"\x80", b"\x82\xa6format\x01\xa7configs\x01"])
def test_what_is_no_choice_is_measured_again(shared: Shared, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "get", lambda key: content)
    kernel = Kernel("k", {64: SLOW, 128: FAST})
    module(kernel)
    assert kernel.launch() == (128, 4)


def test_modules_that_differ_share_nothing(shared: Shared) -> None:
    first, other = Kernel("k", {64: FAST, 128: SLOW}), Kernel("k", {64: SLOW, 128: FAST})
    module(first)
    first.launch()
    offered(shared)
    module(other, file="/somewhere/cdef.py")
    assert other.launch() == (128, 4)


@pytest.mark.parametrize(
    ("others", "block"),
    [("DeviceProperties(type='cuda', index=1, cc=90)", 64), ("DeviceProperties(type='cuda', index=0, cc=80)", 128)],
    ids=["of another GPU", "of another code"],
)
def test_a_choice_holds_for_the_same_module_of_another_gpu(
    shared: Shared, tmp_path: Path, others: str, block: int
) -> None:
    """Torch gives these modules, and their kernels, different files."""
    first, other = Kernel("k", {64: FAST, 128: SLOW}), Kernel("k", {64: SLOW, 128: FAST})
    other.filename = "/somewhere/else.py"
    (tmp_path / "cabc.py").write_text("DeviceProperties(type='cuda', index=0, cc=90)")
    (tmp_path / "cdef.py").write_text(others)
    module(first, file=tmp_path / "cabc.py")
    first.launch()
    offered(shared)
    module(other, file=tmp_path / "cdef.py")
    assert other.launch() == (block, 4)


def test_a_kernel_that_is_dropped_is_not_kept(shared: Shared) -> None:
    kernel = Kernel("k", {64: FAST, 128: SLOW})
    module(kernel)
    gone = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert gone() is None


def test_a_kernel_of_the_user_is_measured_by_each_rank(shared: Shared) -> None:
    kernel = Kernel("k", {64: FAST, 128: SLOW})
    kernel.custom_kernel = True
    module(kernel)
    assert kernel.launch() == (64, 4)
    assert kernel not in tuning._modules


@pytest.mark.parametrize("took", [{64: FAST}, {64: FAST, 128: SLOW}])
def test_a_choice_by_coordinate_descent_is_tried_and_launched_without_another(
    shared: Shared, took: dict[int, float]
) -> None:
    first, later = Kernel("k", took, descends=True), Kernel("k", took, descends=True)
    module(first)
    assert first.launch() == (4096, 8)
    offered(shared)
    module(later)
    assert (later.launch(), later.measured) == ((4096, 8), [4096])  # tried once


@pytest.mark.parametrize(
    "sizes", [{}, {"XBLOCK": "64"}, {"XBLOCK": -64}, {"XBLOCK": 3}, {"XBLOCK": 1 << 20}, {"XBLOCK": 64, "YBLOCK": 1}, 5]
)
def test_a_foreign_choice_by_coordinate_descent_is_not_built(sizes: Any) -> None:
    assert tuning._config_of({"kwargs": sizes, "num_warps": 4, "num_stages": 1}, config(128)) is None
    assert tuning._config_of({"kwargs": {"XBLOCK": 64}, "num_warps": 5, "num_stages": 1}, config(128)) is None


def test_a_choice_by_coordinate_descent_that_does_not_run_here_is_made_again(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, later = Kernel("k", {64: FAST}, descends=True), Kernel("k", {64: FAST}, descends=True)
    module(first)
    first.launch()
    offered(shared)
    module(later)
    failed: list[int] = []

    def bench(launcher: Any) -> float:
        if not failed:
            failed.append(launcher.config.kwargs["XBLOCK"])
            raise RuntimeError("out of resources")
        return FAST

    monkeypatch.setattr(later, "bench", bench)
    assert (later.launch(), failed) == ((4096, 8), [4096])


def test_a_kernel_that_torch_does_not_descend_for_keeps_no_module_back(shared: Shared) -> None:
    template, other = Kernel("template", {64: FAST}, descends=True), Kernel("k", {64: FAST, 128: SLOW})
    template.heuristic_type = HeuristicType.TEMPLATE
    module(template, other)
    assert template.launch() == template.launch() == (64, 4)
    other.launch()
    offered(shared)


def test_a_kernel_of_two_modules_is_a_choice_of_both(shared: Shared) -> None:
    kernel = Kernel("k", {64: FAST, 128: SLOW})
    module(kernel)
    module(kernel, file="/somewhere/cdef.py")
    kernel.launch()
    offered(shared)
    offered(shared)
    assert len(shared.kept) == 2


def test_no_dispatch_mode_sees_a_measurement() -> None:
    class Mode(TorchDispatchMode):
        pass

    kernel = Kernel("k", {64: FAST, 128: SLOW})
    module(kernel)
    with Mode():
        kernel.launch()
    assert kernel.modes == {"None"}


def test_a_measurement_that_no_launch_asks_for_is_torchs_own(shared: Shared) -> None:
    first, later = Kernel("k", {64: FAST, 128: SLOW}), Kernel("k", {64: FAST, 128: SLOW})
    module(first)
    first.launch()
    offered(shared)
    module(later)
    assert len(later.benchmark_all_configs()) == 2


def test_torchs_file_of_a_choice_lies_in_this_process_s_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry names the place where its lead kept it. Here no directory can be made there: it lies below a file."""
    leads, mine = tmp_path / "leads", tmp_path / "mine"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(leads))
    entry = AutotuneCache.create({}, f"{leads}/ab/kernel.py", "hash")
    assert entry is not None
    leads.touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(mine))
    native, loaded = AutotuneCache._setup_local_cache, AutotuneCache("hash")
    monkeypatch.setattr(AutotuneCache, "_setup_local_cache", lambda cache, *a: tuning.in_our_cache(native, cache, *a))
    tuning.in_our_cache(AutotuneCache.__setstate__, loaded, entry.__getstate__())
    loaded.save(config(64), 0)
    assert list(mine.glob("ab/*.best_config"))
    anew = AutotuneCache.create({}, f"{leads}/ab/kernel.py", "hash")
    assert anew is not None
    assert anew._read() is not None
