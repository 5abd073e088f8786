"""Moves a compiled graph to the GPU of the rank that loads it, so that ranks of one node share it.

Torch's keys and the generated code hold the index of the GPU. In an `OpenCompile` with a `gpu` the keys say "this GPU". An
entry that another rank made for its own GPU is moved before torch loads it: what names a GPU in it then names this rank's. An
entry that cannot be moved is not found, and the rank compiles.

Which words name a GPU is up to Inductor's code generator. `RELEASES` are those whose moved entries were compared with entries
that they make for the other GPU (``make test-moved``).
"""

from __future__ import annotations

import ast
import dataclasses
import io
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.backends.inductor import compiles, conditions
from kcoord.backends.inductor.request import UNIT
from kcoord.backends.reliances import release_of, stand_aside
from kcoord.backends.wrapping import is_wrapped

RELEASES = frozenset({"2.11.0", "2.13.0", "2.14.1", "2.15.0"})

_HERE = "kcoord-this-gpu"
"""In keys. No device has this name, so torch without kcoord finds no entry that may have to be moved."""
_NAMED = re.compile(
    r"""(\bcuda:                                          # in arguments and comments
    | \bdevice\(type='cuda',\ index=
    | \bDeviceProperties\(type='cuda',\ index=
    | \b(?:_DeviceGuard|set_device|get_raw_stream)\(
    | \bdefault_generators\[
    )([0-9]+)\b""",
    re.VERBOSE,
)
"""Words that name a GPU in the Python that Inductor and FX write. Names of variables may hold the index, too: no matter."""
_DOUBTFUL = re.compile(
    r"\b(?:device|gpu)s?(?:_?(?:index|idx|id|ordinal)\w*)?['\"]?\s*[:=(]\s*[\[({]?\s*[0-9]", re.IGNORECASE
)
"""Words that are not known here, and may name a GPU."""
_BUILT = re.compile(r"\basync_compile\.(\w+)\(")
_COMPARED = {"triton", "cpp_pybinding", "wait"}  # kernels of other languages were not compared
_KERNEL = re.compile(r"\basync_compile\.triton\('\w+', ('''.*?'''),", re.DOTALL)


def may_hook() -> bool:
    """True if graphs of this torch may be moved. A CUDA release that was not compared is told."""
    import torch

    if torch.version.cuda is None:  # as on ROCm
        return False
    compared = torch.__version__.partition("+")[0] in RELEASES
    if not compared:
        stand_aside("inductor", release_of("torch"), "graphs of other GPUs", "this kcoord was not tested with it")
    return compared


# Before a compile.


@fails_open(lambda graph, inputs: None)
def gpu_of(graph: Any, inputs: Iterable[Any]) -> int | None:
    """The index of this thread's GPU if a unit is on it, and on no other, and may be moved; else None.

    `graph` is Dynamo's: its inputs, weights and intermediate values count.
    """
    import torch
    from torch._inductor.codecache import FxGraphCachePickler

    coordinator = coordinator_in_use()
    if coordinator is None or not coordinator.settings.move or not is_wrapped(FxGraphCachePickler.dumps) or _is_other():
        return None
    if conditions.subclasses(graph, inputs):
        return None
    tensors = (each for each in conditions.values(graph, inputs) if isinstance(each, torch.Tensor))
    devices = {tensor.device for tensor in tensors} - {torch.device("cpu"), torch.device("meta")}
    if [device.type for device in devices] != ["cuda"]:
        return None
    index = devices.pop().index
    return index if index == torch.cuda.current_device() else None


def _is_other() -> bool:
    """True for settings under which torch writes other code than the Python that is known here, or keeps it elsewhere."""
    from torch._functorch import config as functorch
    from torch._inductor import config as inductor

    switches = (inductor, "cpp_wrapper"), (inductor, "fx_wrapper"), (functorch, "bundled_autograd_cache")
    return any(getattr(config, name, False) for config, name in switches)


def key_content(native: Callable[..., bytes], pickler: Any, obj: Any, *args: Any, **kwargs: Any) -> bytes:
    """As ``FxGraphCachePickler.dumps``, of which torch's key is a hash."""
    gpu = compiles.gpu()
    if gpu is None:
        return native(pickler, obj, *args, **kwargs)
    torchs, table = getattr(pickler, "reducer_override", lambda found: NotImplemented), pickler.dispatch_table
    pickler.reducer_override = lambda found: _said_here(found, torchs(found), table.get(type(found)), gpu)
    try:
        return native(pickler, obj, *args, **kwargs)
    finally:
        del pickler.reducer_override  # the class may have one


@fails_open(lambda found, reduced, torchs, gpu: reduced)
def _said_here(found: Any, reduced: Any, torchs: Callable[[Any], Any] | None, gpu: int) -> Any:
    """Reduce an object for the pickle of a key. `reduced`: as torch reduces it; `torchs`: its entry of the dispatch table."""
    import torch

    if isinstance(found, torch.device) and found == torch.device("cuda", gpu):
        return str, (_HERE,)
    if not isinstance(found, torch.fx.GraphModule):
        return reduced
    if reduced is NotImplemented:
        reduced = found.__reduce__() if torchs is None else torchs(found)
    return _saying_here(reduced, gpu)


def _saying_here(reduced: Any, gpu: int) -> Any:
    """A graph as pickle takes it: a function and its arguments, among them the graph's attributes as a dict."""
    if isinstance(reduced, tuple):
        return tuple(_saying_here(each, gpu) for each in reduced)
    if not isinstance(reduced, dict):
        return reduced
    code = _NAMED.sub(lambda named: named[1] + (_HERE if int(named[2]) == gpu else named[2]), reduced["_code"])
    return {**reduced, "_code": code}


# After a lookup.


def storage(native: Callable[..., Any], b: bytes, *args: Any, **kwargs: Any) -> Any:
    """As ``torch.storage._load_from_bytes``, which puts a stored constant on the GPU that it was on."""
    gpu = compiles.gpu()
    if gpu is None:
        return native(b, *args, **kwargs)
    import torch
    from torch.serialization import default_restore_location

    def located(found: Any, place: str) -> Any:
        return default_restore_location(found, f"cuda:{gpu}" if place.startswith("cuda:") else place)

    return torch.load(io.BytesIO(b), map_location=located, weights_only=False)  # as torch does


@fails_open(lambda kind, entry: None)
def moved(kind: str, entry: Any) -> Any:
    """An entry that was found, for the GPU of the compile under way; None if it cannot be moved."""
    gpu = compiles.gpu()
    if gpu is None:
        return entry
    return _moved_unit(entry, gpu) if kind == UNIT else _moved_graph(entry, gpu)


def _moved_unit(entry: Any, gpu: int) -> Any:
    """The graphs of a unit are entries of their own. It holds the backward again, for compiled autograd."""
    if entry.runtime_metadata.graphsafe_rng_state_index is not None:
        entry.runtime_metadata.graphsafe_rng_state_index = gpu
    backward = entry.serialized_bw_module
    if backward is not None:
        content = backward.args[0]
        code = _renamed(content["_code"], gpu, set())
        if code is None:
            return None
        content["_code"] = code
    return entry


def _moved_graph(graph: Any, gpu: int) -> Any:
    constants = (graph.constants or {}).values()
    code = _renamed(graph.source_code, gpu, set(graph.device_idxs))
    if code is None or not {each.device.index for each in constants if getattr(each, "is_cuda", False)} <= {gpu}:
        return None
    if code == graph.source_code:
        return graph
    if not set(_BUILT.findall(code)) <= _COMPARED or getattr(graph, "_serialized_original_gm", None) is not None:
        return None
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.codecache import PyCodeCache

    pairs = zip(_kernels(graph.source_code), _kernels(code), strict=True)
    keys = {CompiledTritonKernels.key(before): CompiledTritonKernels.key(after) for before, after in pairs}
    graph.source_code, graph.cache_key = code, PyCodeCache.write(code)[0]
    graph.device_idxs = type(graph.device_idxs)([gpu])
    if graph._triton_bundle is not None:
        graph._triton_bundle = _moved_bundle(graph._triton_bundle, keys, gpu)
    return graph


def _renamed(code: str, gpu: int, indices: set[int]) -> str | None:
    """`code`, for this GPU; None if it names several, or may do so. `indices`: what else is known of it."""
    named = indices | {int(found[2]) for found in _NAMED.finditer(code)}
    if named <= {gpu}:
        return code
    if len(named) > 1 or _DOUBTFUL.search(_NAMED.sub("", code)):
        return None
    return _NAMED.sub(lambda found: f"{found[1]}{gpu}", code)


def without_index(code: str) -> str:
    """`code` with one word in place of the index of each GPU that it names."""
    return _NAMED.sub(rf"\g<1>{_HERE}", code)


def _kernels(code: str) -> Iterator[str]:
    return (ast.literal_eval(literal) for literal in _KERNEL.findall(code))


def _moved_bundle(bundle: Any, keys: dict[str, str], gpu: int) -> Any:
    """The kernels that were stored with a graph. Its code finds each by a key, a hash of the kernel's source."""
    files = [dataclasses.replace(each, device=gpu) for each in bundle.kernel_artifacts]
    found = [each for each in bundle.static_autotuners if each.cache_key in keys]
    for tuner in (each.kernel for each in found):
        tuner.device_props = tuner.device_props._replace(index=gpu)
        for meta in (tuner.triton_meta, *(result.compile_meta for result in tuner.compile_results)):
            meta["device"] = gpu
    tuners = [dataclasses.replace(each, cache_key=keys[each.cache_key]) for each in found]
    return dataclasses.replace(bundle, kernel_artifacts=files, static_autotuners=tuners)
