"""Requests for libraries, of ``make`` and of ``build``, and the GPU that they are for: the first one of the node.

NineToothed opens it in processes of its own. This process may fork later, or choose another GPU, and so does not open CUDA to
find out: the driver's files name the GPUs' models.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.backends.ninetoothed import traces
from kcoord.backends.reliances import unknown_argument
from kcoord.errors import KeyFactorError
from kcoord.keys.device import GPUTarget, current_device

_DRIVER = Path("/proc/driver/nvidia/gpus")
_LIMITS = ("max_num_regs", "max_nram_size", "max_shared_mem")  # which NineToothed reads
_MODEL = "Model:"


class Gpu(NamedTuple):
    """`factors` identify it in a key. `target`: None if it is not known before CUDA is initialized."""

    factors: dict[str, Any]
    target: GPUTarget | None


@dataclass(eq=False)
class Library:
    """A library to build. `output` is the directory that the user named.

    ``compile(directory, records)`` is NineToothed's, into another directory; it records in `records` what it traces. Steps note
    `traces` and `gpu`, which are in the key, and `made`: digests of the traces that were compiled.
    """

    name: str
    output: Path
    trace: Callable[[], list[dict[str, Any]]]
    compile: Callable[[Path, Path], Any]
    traces: list[dict[str, Any]] = field(default_factory=list)
    gpu: Gpu | None = None
    made: set[str] = field(default_factory=set)


@fails_open(lambda *arguments: None)
def library_of(
    given: Mapping[str, Any], trace: Callable[[], list[dict[str, Any]]], compile: Callable[[Path, Path], Any]
) -> Library | None:
    """None if kcoord is off, or NineToothed is to say itself that something is wrong."""
    name, output = given["kernel_name"], given["output_dir"]
    if coordinator_in_use() is None or not isinstance(name, str) or output is None or not Path(output).is_dir():
        return None
    return Library(name, Path(output), trace, compile)


def of_build(native: Any, premake: Any, configs: Any, **kwargs: Any) -> Library | None:
    """The request of these arguments of `build`, which `native` is. None as for `library_of`."""
    bound = inspect.signature(native).bind(premake, configs, **kwargs)
    if unknown_argument(bound, traces.BUILT_OF):
        return None
    bound.apply_defaults()
    given = {**bound.arguments, "caller": bound.arguments["caller"] or "cuda"}

    def compile(directory: Path, records: Path) -> Any:
        return native(traces.Premake(premake, records), configs, **{**kwargs, "output_dir": directory})

    return library_of(given, lambda: traces.of_build(sys.modules[native.__module__], given), compile)


def gpu(driver: Path = _DRIVER) -> Gpu:
    """Read live. Raises `KeyFactorError` if it is not known here, and what Triton's driver raises."""
    import torch
    import triton

    if os.environ.get("TRITON_DEFAULT_BACKEND", "nvidia") == "nvidia":
        found = _models(driver) if torch.version.cuda else []
        if len(found) > 1:
            raise KeyFactorError("this node has GPUs of several models")
        if found:
            return Gpu({"models": found}, current_device().target if torch.cuda.is_initialized() else None)
        if (torch.version.cuda or torch.version.hip) and not torch.cuda.is_initialized():
            raise KeyFactorError("its GPU is not known yet: call torch.cuda.set_device first")
    active = triton.runtime.driver.active
    target = active.get_current_target()
    limits = active.utils.get_device_properties(active.get_current_device())
    made = GPUTarget(target.backend, target.arch, target.warp_size)
    return Gpu({"target": made, "limits": {name: limits[name] for name in _LIMITS if name in limits}}, made)


def _models(driver: Path) -> list[str]:
    """The models of this node's GPUs, each once."""
    found: set[str] = set()
    for file in driver.glob("*/information"):
        lines = file.read_text().splitlines()
        found.update(line.removeprefix(_MODEL).strip() for line in lines if line.startswith(_MODEL))
    return sorted(found)
