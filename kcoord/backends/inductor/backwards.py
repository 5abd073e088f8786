"""The backward of a unit that another rank leads, compiled here while that rank compiles the forward.

Torch compiles a forward first: its code decides the strides of the tensors that are saved for the backward. Mostly they are those
of the trace. A rank that finds a unit under way traces it, too, and compiles the backward for these strides. The unit's lead asks
for its backward as for any graph, and finds it; with other strides it has another key, and the lead compiles it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch._guards import TracingContext

from kcoord.backends.fail_open import fails_open
from kcoord.backends.inductor import compiles
from kcoord.backends.inductor.request import GRAPH
from kcoord.interruption import let_through


def partitioned(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As ``_aot_stage2a_partition``, which returns the forward, the backward and numbers of what is saved for it."""
    found = native(*args, **kwargs)
    _compile_ahead(native, found, *args, **kwargs)
    return found


@fails_open(lambda *args, **kwargs: None)
def _compile_ahead(native: Callable[..., Any], found: tuple[Any, ...], *args: Any, **kwargs: Any) -> None:
    unit, context = compiles.following(), TracingContext.try_get()
    if unit is None or unit.backwards is None or context is None:
        return
    from torch._functorch._aot_autograd import graph_compile

    if any("convolution" in str(node.target) for node in found[1].graph.nodes):
        return  # their forward mostly has other strides
    given = inspect.signature(native).bind(*args, **kwargs).arguments
    metadata, subclasses = given["fw_metadata"], given["maybe_subclass_meta"]
    call = {
        "bw_module": found[1],
        "maybe_subclass_meta": subclasses,
        "fw_metadata": metadata,
        "fwd_output_strides": None,
        "num_symints_saved_for_bw": found[3],
        "aot_config": given["aot_config"],
        "bw_compiler": unit.backwards(),  # an argument from torch 2.13 on
    }
    compiled = graph_compile._aot_stage2b_bw_compile
    before, context.fw_metadata = context.fw_metadata, graph_compile._get_inner_meta(subclasses, metadata)
    try:
        with compiles.passing_over(GRAPH):
            compiled(**{name: call[name] for name in inspect.signature(compiled).parameters})
    except compiles.Passed:
        pass  # another rank is at it
    except Exception as error:  # noqa: BLE001 - torch meets it again in its turn
        let_through(error)
    finally:
        context.fw_metadata = before
        compiles.unmark(node.meta.get("val") for node in found[1].graph.nodes if node.op == "placeholder")
