"""Donation: a compiled backward overwrites saved tensors that only it can see, unless the graph is retained.

Torch compiles a backward at its first call, and knows. A lead compiles it with the forward, and a rank that loads it has it by
then: both have code that overwrites. A call that retains the graph gives this code copies.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kcoord.backends.fail_open import fails_open

_UNDONATED = "kcoord-undonated"
_ARGUMENTS = re.compile(r"^ +(\w+(?:, \w+)*),? = args$", re.MULTILINE)
_REUSE = re.compile(r"^.*# reuse$", re.MULTILINE)


def joined(native: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """As ``AOTDispatchAutograd.post_compile``, which makes one function of a forward and a backward.

    Torch refuses to run a backward that donates where the graph is retained: as it sees it, this one does not donate.
    """
    args, kwargs = _sparing(native, args, kwargs)
    return native(*args, **kwargs)


@fails_open(lambda native, args, kwargs: (args, kwargs))
def _sparing(
    native: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    bound = inspect.signature(native).bind(*args, **kwargs)
    spec = bound.arguments.get("spec")  # from torch 2.13 on
    given: Mapping[str, Any] = bound.arguments if spec is None else vars(spec)
    backward, metadata = given["compiled_bw_func"], given["fw_metadata"]
    if not metadata.bw_donated_idxs or not hasattr(backward, "_boxed_call"):
        return args, kwargs  # it is not compiled yet, or donates nothing
    changed = {"compiled_bw_func": spares(backward, metadata.bw_donated_idxs), "fw_metadata": copy.copy(metadata)}
    changed["fw_metadata"].bw_donated_idxs = []
    if spec is None:
        bound.arguments.update(changed)
    else:
        bound.arguments["spec"] = dataclasses.replace(spec, **changed)
    return bound.args, bound.kwargs


def spares(backward: Callable[[list[Any]], Any], donated: Sequence[int]) -> Callable[[list[Any]], Any]:
    """`backward`, which leaves its saved tensors as they are if it may run again. `donated`: indices of its arguments."""
    import torch
    from torch._inductor.utils import clone_preserve_strides

    taken = overwritten(getattr(backward, "source_code", ""), donated)

    def call(args: list[Any]) -> Any:
        if torch._C._autograd._get_current_graph_task_keep_graph():
            for index in taken:
                args[index] = clone_preserve_strides(args[index])
        return backward(args)

    call._boxed_call = True  # type: ignore[attr-defined]  # torch's word for: it takes a list, and empties it
    return call


def overwritten(source: str, donated: Sequence[int]) -> list[int]:
    """Those of `donated` that generated code overwrites; all of them if that cannot be told.

    A buffer that takes the memory of another one is assigned from it, in a line that says so.
    """
    found, lines = _ARGUMENTS.search(source), " ".join(_REUSE.findall(source))
    names = found.group(1).split(", ") if found is not None else []
    if len(names) <= max(donated) or ("in_out_ptr" in source and not lines):
        return list(donated)
    reused = set(re.findall(r"\w+", lines))
    return [index for index in donated if names[index] in reused]


def told_apart() -> contextlib.AbstractContextManager[object]:
    """A block in which torch's caches answer a backward that retains its graph with none that donates.

    Torch's key of a graph does not say which it is. Stock computes wrong gradients from such an entry (seen with 2.13).
    """
    import torch
    from torch.compiler import config

    in_backward = torch._C._current_graph_task_id() != -1
    if not in_backward or not torch._C._autograd._get_current_graph_task_keep_graph():
        return contextlib.nullcontext()
    patch: contextlib.AbstractContextManager[object] = config.patch(cache_key_tag=f"{config.cache_key_tag}{_UNDONATED}")
    return patch
