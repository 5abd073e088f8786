"""Compiles that must not be shared: they run collectives, or nobody can tell what they depend on."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any

from kcoord.backends.inductor.request import UNIT

_COLLECTIVE = {
    "torch._inductor.config": (
        "aten_distributed_optimizations.enable_overlap_scheduling",
        "aten_distributed_optimizations.spmd_check",
        "aten_distributed_optimizations.enable_low_contention_collectives",
        "distributed_max_autotune_gemm",
        "bucket_all_gathers_fx",  # pytorch#188332: entries depend on the rank
        "bucket_reduce_scatters_fx",
    ),
    "torch._inductor.config_comms": (
        "runtime_estimations_align_across_all_distributed_ranks",
        "reorder_for_compute_comm_overlap_broadcast_runtime_estimations",
    ),
    "torch._functorch.config": ("_sync_decision_cross_ranks", "_sync_cache_decision_cross_ranks"),
}
"""Settings under which ranks talk to each other while they compile. A rank that waits for the compile would not answer."""

_SUSPECT = re.compile("(?<!a)sync|cross_ranks|collective|distributed")
"""Matches names of switches that may make ranks talk to each other, for those of later versions of torch."""

_OVERLAP = "aten_distributed_optimizations."
_HARMLESS = {
    "torch._inductor.config": {
        # details of overlap scheduling, which is switched by a setting above
        *(_OVERLAP + name for name in (
            "bucket_exposed_first", "bucket_mode", "bucket_only_internode_comms", "collective_bucketing", "collective_estimator",
            "compute_estimator", "custom_runtime_estimation", "enable_fusion_regions", "insert_overlap_deps",
            "log_final_collectives_estimations", "overlap_scheduling_autofix_cycles", "pre_bucketing_fsdp_collectives",
            "pre_bucketing_fsdp_collectives_verbose", "prioritize_bucketing_during_scheduling",
            "profile_guided_estimations_profile_path", "spmd_mismatch",
        )),
        # details of low-contention collectives
        *(_OVERLAP + name for name in ("low_contention_all_gather_ce_multicast", "low_contention_skip_overlap_check")),
        # these rewrite or reorder this rank's graph, and ask nobody
        *(_OVERLAP + name for name in ("allow_comms_decompositions", "enable_simple_overlap")),
        "_collective.auto_select",
        # these wait for the GPU, and later than a compile
        "triton.debug_sync_graph", "triton.debug_sync_kernel", "triton.force_cudagraph_sync",
    },
    "torch._functorch.config": {"unsafe_allow_optimization_of_collectives"},  # which tensors are saved, by this rank's graph
    "torch._dynamo.config": {"enable_compiler_collectives"},  # Dynamo talks before it has a graph to compile
}  # fmt: skip
"""Switches with such names that were read in torch 2.11 to 2.15."""

_CUSTOM = {
    "torch._inductor.config": (
        "pre_grad_custom_pass",
        "joint_custom_pre_pass",
        "joint_custom_post_pass",
        "post_grad_custom_pre_pass",
        "post_grad_custom_post_pass",
        "_pre_fusion_custom_pass",
        "_post_fusion_custom_pass",
    ),
    "torch._functorch.config": ("joint_custom_pass",),
}
"""Passes of the user: they may do anything, collectives included."""

_OFF: tuple[Any, ...] = (None, False, "", "none", [])

_TORCHS = frozenset(
    {
        "aten", "prim", "prims", "inductor", "higher_order", "quantized", "quantized_decomposed", "rngprims", "mkldnn", "mkl",
        "onednn", "c10d", "_c10d_functional", "c10d_functional", "fsdp", "symm_mem", "_dtensor",
    }
)  # fmt: skip
"""Namespaces of torch's own operators, whose sources are in torch's key."""


SPREAD = "its tensors are spread over a mesh, and torch's key does not hold this rank's part"


def problem(kind: str, graph: Any, inputs: Iterable[Any] = ()) -> str:
    """Why a unit, or a graph, is compiled by each rank for itself; empty if it may be shared. Its kernels are shared anyway."""
    for name, value in (*_settings(_COLLECTIVE), *_settings(_CUSTOM)):
        if value not in _OFF:
            return f"{name} is set: ranks may talk to each other while they compile"
    for name in unknown_switches():
        return f"{name} is on, which this kcoord does not know: ranks may talk to each other while they compile"
    if kind == UNIT:
        if _compiled_autograd():
            return "compiled autograd compiles the backward"
        foreign = next(_foreign_operators(graph), None)
        if foreign is not None:
            return f"its graph calls {foreign}, whose sources are in no key"
        if is_spread(graph, inputs):
            return SPREAD
        for each in subclasses(graph, inputs):
            if each.__module__.partition(".")[0] != "torch":
                return f"it has tensors of the class {each.__qualname__}, whose sources are in no key"
    return ""


def is_spread(graph: Any, inputs: Iterable[Any]) -> bool:
    """True for a unit with tensors that are spread over a mesh.

    Its trace takes this rank's part, and names process groups and a GPU. Torch 2.13's key of it holds none of these.
    """
    spread = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return any(issubclass(each, spread) for each in subclasses(graph, inputs))


def subclasses(graph: Any, inputs: Iterable[Any]) -> set[type]:
    """The classes of a unit's tensors that AOTAutograd traces through: of inputs, weights and intermediate values."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    return {type(value) for value in values(graph, inputs) if is_traceable_wrapper_subclass(value)}


def values(graph: Any, inputs: Iterable[Any]) -> Iterator[Any]:
    """Inputs, weights and intermediate values of a unit, with the tensors that a tensor is made of."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    weights = (*graph.parameters(), *graph.buffers()) if hasattr(graph, "parameters") else ()
    pending = [*inputs, *weights, *(node.meta.get("example_value") for node in _nodes(graph))]
    while pending:
        value = pending.pop()
        if isinstance(value, (tuple, list)):
            pending += value
        else:
            yield value
        if is_traceable_wrapper_subclass(value):
            pending += [getattr(value, name) for name in value.__tensor_flatten__()[0]]


def enters_autocast(node: Any) -> bool:
    """True for a node that enters or leaves autocast and depends on nothing but the graph, which is in torch's key.

    Models of Hugging Face have such nodes. Torch keeps no unit of a graph with one; its later versions do.
    """
    amp = sys.modules.get("torch.amp.autocast_mode")
    if node.op != "call_function" or node.target is None:
        return False
    if node.target is getattr(amp, "_exit_autocast", None):
        return True
    if node.target is not getattr(amp, "_enter_autocast", None) or node.kwargs or len(node.args) < 3:
        return False
    _, dtype, enabled, *_ = node.args
    return not enabled or dtype is not None  # else it takes the type that is set around it


def _settings(names: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, Any]]:
    """The settings of `names` that this version of torch has."""
    for module, attributes in names.items():
        config = sys.modules.get(module)
        for attribute in attributes if config is not None else ():
            try:
                yield f"{module}.{attribute}", attrgetter(attribute)(config)
            except AttributeError:
                continue


def unknown_switches(is_on: Callable[[Any], bool] = lambda value: value is True) -> Iterator[str]:
    """Switches of this version that may make ranks talk to each other, as far as their names tell."""
    for module, harmless in _HARMLESS.items():
        config = sys.modules.get(module)
        for name in filter(_SUSPECT.search, getattr(config, "_config", ())):
            if name not in harmless and name not in _COLLECTIVE.get(module, ()) and is_on(getattr(config, name, None)):
                yield f"{module}.{name}"


def _compiled_autograd() -> bool:
    flags = {
        "torch._dynamo.config": "compiled_autograd",
        "torch._dynamo.compiled_autograd": "compiled_autograd_enabled",
    }
    return any(getattr(sys.modules.get(module), flag, False) for module, flag in flags.items())


def _foreign_operators(graph: Any) -> Iterator[str]:
    """Operators of the user: AOTAutograd traces through their formulas, which are in no key."""
    for node in _nodes(graph):
        packet = str(getattr(node.target, "_qualified_op_name", ""))  # an operator whose overload is chosen later
        namespace = getattr(node.target, "namespace", None) or packet.partition("::")[0]
        if isinstance(namespace, str) and namespace and namespace not in _TORCHS:
            yield str(node.target)


def _nodes(graph: Any) -> Iterator[Any]:
    for module in graph.modules() if hasattr(graph, "modules") else ():
        yield from getattr(getattr(module, "graph", None), "nodes", ())
