"""Torch's own functions, wrapped where compiles begin and end and where torch looks into its caches.

Outside a compile no claim is taken: torch also looks up a backward while it loads a unit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import pickle
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch._guards import TracingContext
from torch._inductor import config
from torch._inductor.codecache import FxGraphCache
from torch._inductor.runtime.runtime_utils import triton_cache_dir

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.inductor import (
    backwards,
    compiles,
    conditions,
    cpp,
    ddp,
    donation,
    moving,
    place,
    probes,
    tuning,
    workers,
)
from kcoord.backends.inductor.adapter import backend
from kcoord.backends.inductor.ambient import is_alone, tagged
from kcoord.backends.inductor.compiles import OpenCompile
from kcoord.backends.inductor.request import GRAPH, UNIT, Entry
from kcoord.backends.reliances import Part, Tripwire
from kcoord.backends.wrapping import wraps
from kcoord.files.atomic import locked
from kcoord.ranks import ranks_of

_LOCK = "inductor.lock"
_patience = [5.0]  # seconds that this process may still wait for it, for all graphs together
_UNIT_KEY = re.compile(r"a\w{40,}")  # torch's own; a drawn one is a number, or a UUID from torch 2.15 on
_TOOK = "forward_time_taken_ns", "backward_time_taken_ns", "_time_taken_ns"  # of torch's entries of both kinds
_LOOKUP = "cls key local remote_cache evaluate_guards hints"
_AOT, _TUNER = "_functorch._aot_autograd", "_inductor.runtime.triton_heuristics:CachingAutotuner"
_SUBPROC = "_inductor.compile_worker.subproc_pool"
Table = Mapping[str, tuple[str, Callable[..., Any] | None]]

BUILDS = Part(
    "inductor", "torch", "C++ builds",
    {
        "_inductor.codecache:_worker_compile_cpp": "lock_path cpp_builders",
        "_inductor.codecache:_precompile_header": "header hashable_cmd_line ...",
    },
)  # fmt: skip


def hook() -> None:
    """Idempotent."""
    if _wrap(UNITS, _UNITS):
        _wrap(OVERLAP, _OVERLAP)  # for units alone
        _wrap(UNDER_WAY, _UNDER_WAY)
        if moving.may_hook():
            _wrap(MOVING, _MOVING)
    _wrap(TUNING, _TUNING)
    _wrap(PROBES, _PROBES)
    if _wrap(WORKERS, _WORKERS):
        WORKERS.wrap(f"{_SUBPROC}:subprocess", workers.Subprocess)
    if BUILDS.holds():
        cpp.hook()


def _part(name: str, table: Table) -> Part:
    return Part("inductor", "torch", name, {each: call for each, (call, _) in table.items()})


def _wrap(part: Part, table: Table) -> bool:
    """Put ``wrapper(native, …)`` in place of each function and method. False if kcoord stands aside."""
    holds = part.holds()
    for name, (_, wrapper) in table.items() if holds else ():
        if wrapper is not None:
            part.wrap(name, functools.partial(_wrapped, wrapper))
    return holds


def _wrapped(wrapper: Callable[..., Any], native: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(native)
    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(native, *args, **kwargs)

    return call


# Where compiles begin and end.


def _unit(native: Callable[..., Any], aot: Any, gm: Any, example_inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``AotAutograd.__call__``."""
    place.look()
    problem = _problem(UNIT, gm, example_inputs)
    gpu = None if problem else moving.gpu_of(gm, example_inputs)
    if gpu is None:
        _tell_of_devices(example_inputs)
    unit = OpenCompile(UNIT, problem, gpu, graph=gm, by_graphs=_goes_by_graphs(gm))
    unit.backwards = lambda: aot.kwargs["bw_compiler"]
    with _tagged(_is_spread(gm, example_inputs)), unit:
        return native(aot, gm, example_inputs, *args, **kwargs)


@fails_open(lambda graph: False)
def _goes_by_graphs(graph: Any) -> bool:
    """True if ranks share the graphs of a unit one by one while it is under way.

    With CUDA graphs a backward's key depends on what became of this rank's forward.
    """
    plain = not config.triton.cudagraphs and "cudagraph_annotation" not in getattr(graph, "meta", {})
    return plain and (ranks_of().world or 1) > 1 and compiles.in_turn() and _knows_parts()


@functools.cache
def _knows_parts() -> bool:
    return UNDER_WAY.holds()


@fails_open(lambda inputs: None)
def _tell_of_devices(inputs: Any) -> None:
    """Torch's key holds the GPU's index; one rank of each node says what that costs."""
    if ranks_of().local == 1 and any(getattr(getattr(each, "device", None), "index", None) == 1 for each in inputs):
        notices.tell(
            "torch.compile: keys hold the GPU's index, so the ranks of a node share kernels and no graphs; torchrun's"
            " --virtual-local-rank gives each rank its GPU as cuda:0 (docs/torch-compile.md)"
        )


def _graph(native: Callable[..., Any], gm: Any, *args: Any, **kwargs: Any) -> Any:
    unit = compiles.leading()
    if unit is not None and not unit.by_graphs:  # it is shared whole
        return native(gm, *args, **kwargs)
    place.look()
    problem = conditions.SPREAD if is_alone() else _problem(GRAPH, gm)
    with _tagged(), _told_apart(), OpenCompile(GRAPH, problem, compiles.gpu(), graph=gm):  # the GPU of its unit
        return native(gm, *args, **kwargs)


_tagged = fails_open(lambda alone=False: contextlib.nullcontext())(tagged)
_told_apart = fails_open(lambda: contextlib.nullcontext())(donation.told_apart)
_is_spread = fails_open(lambda graph, inputs: True)(conditions.is_spread)


@fails_open(lambda kind, graph, inputs=(): "an error in kcoord")
def _problem(kind: str, graph: Any, inputs: Any = ()) -> str:
    return _told(kind, conditions.problem(kind, graph, inputs))


def _told(kind: str, problem: str) -> str:
    if problem:
        notices.tell(f"torch.compile: a {'unit' if kind == UNIT else 'graph'} is not shared: {problem}", about=problem)
    return problem


def _backward_with_forward(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The ranks of a unit have its backward compiled with its forward: in step, inside ``loss.backward()``, all would."""
    open_compile = compiles.leading() or compiles.following()
    if open_compile is None or open_compile.kind != UNIT:
        return native(*args, **kwargs)
    given = inspect.signature(native).bind(*args, **kwargs)
    config = given.arguments["aot_config"]
    given.arguments["aot_config"] = dataclasses.replace(config, force_non_lazy_backward_lowering=True)
    try:
        return native(*given.args, **given.kwargs)
    except Exception as error:  # noqa: BLE001 - perhaps nobody needs it: stock finds out in ``loss.backward()``
        open_compile.refuse_sharing(f"its backward does not compile: {type(error).__name__}: {error}")
        return native(*args, **kwargs)


# Where torch looks into its caches, and writes to them.


def _check_node(native: Callable[..., None], node: Any, *args: Any, **kwargs: Any) -> None:
    """As ``check_node_safe``, which raises for a node that a unit's key does not cover."""
    if not conditions.enters_autocast(node):
        native(node, *args, **kwargs)


def _lookup(
    kind: str,
    native: Callable[..., Any],
    key: str,
    local: bool,
    remote_cache: Any,
    evaluate_guards: Callable[[str, list[int]], bool],
    hints: list[int],
    *args: Any,
    **kwargs: Any,
) -> Any:
    open_compile = compiles.innermost()
    if open_compile is not None and open_compile.kind == kind:
        open_compile.looked_up = True
    begun = time.perf_counter()
    found = native(key, local, remote_cache, evaluate_guards, hints, *args, **kwargs)
    is_torchs = found[0] is not None
    if not is_torchs:
        found = _looked_up(kind, key, evaluate_guards, hints) or found
        if local and found[0] is not None:
            _keep_in_torchs_cache(kind, key, found[1])
    if found[0] is not None and moving.moved(kind, found[0]) is None:
        return None, None, {"cache_status_detailed": "full_miss"}
    if is_torchs:
        _count(kind, key, hints, found[0], begun)
    return found


@fails_open(lambda *arguments: None)
def _looked_up(kind: str, key: str, evaluate_guards: Callable[[str, list[int]], bool], hints: list[int]) -> Any:
    open_compile = compiles.innermost()
    if open_compile is None:
        return None
    if open_compile.kind == kind and open_compile.asked is None:
        open_compile.ask(_asked(open_compile, key, hints))
    for content in open_compile.given.get((kind, key), ()):
        entry = pickle.loads(content)  # verified: `backend.begin` returned its artifact
        if not entry.guards_expr or evaluate_guards(entry.guards_expr, hints):
            return entry, content, {"cache_status_detailed": "hit"}
    return None


@fails_open(lambda kind, key, content: None)
def _keep_in_torchs_cache(kind: str, key: str, content: bytes) -> None:
    """Torch keeps the unit of a graph there. It would trace a unit that has no graphs each time, and ask nobody for it."""
    open_compile = compiles.innermost()
    if kind == GRAPH and open_compile is not None and open_compile.kind == GRAPH and _knows_parts():
        with contextlib.suppress(OSError):
            FxGraphCache._write_to_local_cache(key, content)


@fails_open(lambda *arguments: None)
def _count(kind: str, key: str, hints: list[int], found: Any, begun: float) -> None:
    """Torch's own cache had the unit or graph that is asked for."""
    open_compile = compiles.innermost()
    if open_compile is not None and open_compile.kind == kind and open_compile.asked is None:
        open_compile.asked = _asked(open_compile, key, hints)
        saved = sum(getattr(found, name, None) or 0 for name in _TOOK) / 1e9
        backend.loaded_natively(open_compile.asked, saved, begun)


def _asked(open_compile: OpenCompile, key: str, hints: list[int]) -> Entry:
    kind = open_compile.kind
    if kind == UNIT and not _UNIT_KEY.fullmatch(key):  # with `bypass_autograd_cache_key`
        open_compile.problem = _told(UNIT, "torch has drawn its key at random")
    donated = _donated() if kind == GRAPH else ()
    return Entry(kind, key, tuple(map(int, hints)), donated, open_compile.problem, open_compile.graph)


def _donated() -> tuple[int, ...]:
    """The saved tensors that the backward under way may overwrite."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return tuple(getattr(metadata, "bw_donated_idxs", None) or ())


def _keyed(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    found = native(*args, **kwargs)
    if found[0] is None:
        _withhold(str(found[1].get("cache_bypass_reason", "")))
    return found


@fails_open(lambda why: None)
def _withhold(why: str) -> None:
    """Let waiting ranks go: torch cannot cache a graph of the unit that this rank leads."""
    unit = compiles.leading(UNIT)
    if unit is not None:
        unit.refuse_sharing(f"torch does not cache its graph: {why}")


def _recording(
    native: Callable[..., Any], artifact_type: str, key: str, content: Any, *args: Any, **kwargs: Any
) -> None:
    native(artifact_type, key, content, *args, **kwargs)
    _record(artifact_type, key, content)


@fails_open(lambda *arguments: None)
def _record(kind: str, key: str, content: Any) -> None:
    compiles.record(kind, key, content)
    open_compile = compiles.innermost()
    if open_compile is not None and open_compile.kind == kind and not open_compile.looked_up:
        UNSEEN.trip()


def _emit(native: Callable[..., Any], bundle: Any, *args: Any, **kwargs: Any) -> Any:
    """As ``TritonBundler.read_and_emit``, which writes the kernels of a loaded graph to Triton's directory.

    Ranks that load the same graph at once would each write them. All but the first one's would stay, with a warning each.
    """
    with contextlib.ExitStack() as stack:
        _enter_lock(stack, bundle)
        return place.emitted(native, bundle, *args, **kwargs)


@fails_open(lambda stack, bundle: None)
def _enter_lock(stack: contextlib.ExitStack, bundle: Any) -> None:
    missing = any(
        not Path(triton_cache_dir(each.device), each.kernel_hash).exists() for each in bundle.kernel_artifacts
    )
    coordinator = coordinator_in_use() if missing else None
    if coordinator is not None and coordinator.usable:
        begun = time.monotonic()
        stack.enter_context(locked(coordinator.settings.local_dir / _LOCK, _patience[0]))
        _patience[0] -= time.monotonic() - begun


# By name, the call and the wrapper.

_UNITS: Table = {
    f"{_AOT}.autograd_cache:AOTAutogradCache.find_guarded_entry": (_LOOKUP, functools.partial(_lookup, UNIT)),
    f"{_AOT}.autograd_cache:check_node_safe": ("node", _check_node),
    f"{_AOT}.graph_compile:_aot_stage2b_bw_compile": ("aot_config= ...", _backward_with_forward),
    f"{_AOT}.runtime_wrappers:AOTDispatchAutograd.post_compile": ("", donation.joined),
    f"{_AOT}.schemas:AOTConfig.force_non_lazy_backward_lowering": ("", None),
    "_inductor.codecache:FxGraphCache.find_guarded_entry": (_LOOKUP, functools.partial(_lookup, GRAPH)),
    "_inductor.codecache:FxGraphCache.prepare_key": ("", _keyed),
    "_inductor.runtime.autotune_cache:AutotuneCache._setup_local_cache": ("", tuning.in_our_cache),
    "_inductor.runtime.autotune_cache:AutotuneCache.__setstate__": ("", tuning.in_our_cache),
    "_inductor.triton_bundler:TritonBundler.read_and_emit": ("bundle", _emit),
    "compiler._cache:CacheArtifactManager.record_artifact": ("cls artifact_type key content", _recording),
    # last: a compile that these see begin meets all others
    "_dynamo.backends.common:AotAutograd.__call__": ("self gm example_inputs", _unit),
    "_inductor.compile_fx:_compile_fx_inner": ("gm ...", _graph),
}
_UNDER_WAY: Table = {
    f"{_AOT}.graph_compile:_aot_stage2a_partition": (
        "maybe_subclass_meta= fw_metadata= aot_config= ...",
        backwards.partitioned,
    ),
    f"{_AOT}.graph_compile:_get_inner_meta": ("_ _", None),
    "_inductor.codecache:FxGraphCache._write_to_local_cache": ("key content", None),
}
_OVERLAP: Table = {
    "_dynamo.backends.distributed:SubmodCompiler.__init__": ("self module compiler ...", ddp.made),
    "_dynamo.backends.distributed:SubmodCompiler.run_node": ("self n", ddp.run_node),
}
_MOVING: Table = {
    "_inductor.async_compile:CompiledTritonKernels.key": ("kernel_src", None),
    "_inductor.codecache:FxGraphCachePickler.dumps": ("self obj", moving.key_content),
    "_inductor.codecache:PyCodeCache.write": ("cls source_code", None),
    "storage:_load_from_bytes": ("b", moving.storage),
}
_TUNING: Table = {
    "_inductor.async_compile:AsyncCompile.wait": ("self scope", tuning.kernels_ready),
    f"{_TUNER}.autotune_to_one_config": ("self ...", tuning.fastest),
    f"{_TUNER}.benchmark_all_configs": ("self ...", tuning.measurements),
    f"{_TUNER}.coordinate_descent_tuning": ("self ...", tuning.descended),
    "_inductor.runtime.coordinate_descent_tuner:CoordescTuner.autotune": ("self func baseline_config", tuning.descent),
}
_PROBES: Table = {
    "_inductor.cpu_vec_isa:VecISA.check_build": ("self code", probes.check_build),
    "_inductor.cpu_vec_isa:VecISA.build_arch_flags": ("self", None),
    "_inductor.cpu_vec_isa:VecISA.build_macro": ("self", None),
    "_inductor.cpp_builder:get_cpp_compiler": ("", None),
}
_WORKERS: Table = {
    f"{_SUBPROC}:SubprocPool.submit": ("self job_fn ...", workers.submit),
    f"{_SUBPROC}:SubprocPool.wakeup": ("self", workers.wakeup),
    f"{_SUBPROC}:SubprocPool.quiesce": ("self", workers.quiesce),
    f"{_SUBPROC}:SubprocPool.shutdown": ("self", workers.shutdown),
    f"{_SUBPROC}:subprocess": ("", None),
    f"{_SUBPROC}:SubprocMain._start_pool": ("self", None),
    f"{_SUBPROC}:_warm_process_pool": ("pool n", None),
    "_inductor.async_compile:_pool_set": ("", None),
}
UNDER_WAY = _part("units that another rank compiles", _UNDER_WAY)
UNITS, OVERLAP = _part("units and graphs", _UNITS), _part("overlap of DDP's buckets", _OVERLAP)
UNSEEN = Tripwire(UNITS, "it keeps compiles that it has not looked up where kcoord answers")
MOVING, TUNING = _part("graphs of other GPUs", _MOVING), _part("tuning", _TUNING)
PROBES = _part("probes of the processor", _PROBES)
WORKERS = _part("compile workers", _WORKERS)
