"""NineToothed's compiles, as they are traced and recorded: in this process, and in those of a build's pool.

A pool's process imports the script anew, and need not know of kcoord: `Premake`, which it is sent, hooks NineToothed there.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from kcoord.backends.fail_open import fails_open, notices
from kcoord.backends.ninetoothed import sources, traces
from kcoord.backends.wrapping import differing, is_wrapped, wraps

_NEEDED = {
    "aot:_HEADER_CONTENT": "",
    "aot:_HEADER_PATH": "",
    "aot:_load_launch_func": "kernel_name output_dir",
    "build:_LazyKernel": "factory",
    "build:_make": "premake config caller kernel_name output_dir",
    "build:build": "premake configs meta_parameters caller kernel_name output_dir lazy",
    "generation:CACHE_DIR": "",
    "generation:CodeGenerator.__call__": "self func caller kernel_name num_warps num_stages max_num_configs prettify",
    "generation:cache_source": "source",
    "generation:triton.knobs": "",
    "jit:import_from_path": "module_name file_path",
    "make:aot": "func caller kernel_name output_dir num_warps num_stages",
    "symbol:block_size._num_block_sizes": "",
    "tensor:Tensor.num_instances": "",
}
"""The names that are used, and the parameters of functions."""


def hook() -> bool:
    """Trace or record the compiles of this process where `traces.calls` says so. Idempotent; False for a release not known."""
    if name := differing("ninetoothed", _NEEDED):
        notices.tell(f"this NineToothed's {name.replace(':', '.')} differs: its kernels are compiled by each rank")
        return False
    package = {name: sys.modules[f"ninetoothed.{name}"] for name in {each.partition(":")[0] for each in _NEEDED}}
    if not is_wrapped(package["make"].aot):
        sources.hook(package["generation"], package["jit"], package["tensor"], package["symbol"])
        vars(package["make"])["aot"] = _recording(package["make"].aot)
    return True


def _recording(native: Any) -> Any:
    """`aot`, which ``make(caller="cuda")`` calls, and so each process of a build's pool."""
    signature = inspect.signature(native)

    @wraps(native)
    def aot(*args: Any, **kwargs: Any) -> Any:
        bound, calls = signature.bind(*args, **kwargs), traces.calls
        bound.apply_defaults()
        if calls.traced is not None:
            calls.traced.append(traces.of_call(bound.arguments))
            return None
        if calls.recorded is not None:
            traces.record(bound.arguments, calls.recorded)
        return native(**bound.arguments)

    return aot


class Premake:
    """A build's `premake`, in a process of its pool: what is generated there is recorded in the directory `place`."""

    def __init__(self, premake: Any, place: Path) -> None:
        self.__wrapped__, self._place = premake, place  # `inspect.signature` follows the first

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._attend()
        return self.__wrapped__(*args, **kwargs)

    @fails_open(lambda self: None)
    def _attend(self) -> None:
        hook()
        traces.calls.recorded = self._place
