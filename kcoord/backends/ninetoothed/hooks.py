"""NineToothed's ``build``, and the ahead-of-time compiles of its ``make``, answered by the backend."""

from __future__ import annotations

import functools
import inspect
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open, notices
from kcoord.backends.ninetoothed import sources, traces
from kcoord.backends.wrapping import differing, is_wrapped, wraps

if TYPE_CHECKING:
    from kcoord.backends.ninetoothed.backend import Library, NineToothedBackend

_NEEDED = {
    "aot:_HEADER_CONTENT": "",
    "aot:_HEADER_PATH": "",
    "aot:_load_launch_func": "kernel_name output_dir",
    "aot:subprocess": "",
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


class _Subprocess:
    """`subprocess`, for NineToothed: it runs Triton's compiler with this process's Python, and not with the first on PATH.

    The key holds the Triton of this process.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)

    def run(self, command: Any, *args: Any, **kwargs: Any) -> Any:
        if command[0] == "python" and sys.executable:
            command = [sys.executable, *command[1:]]
        return subprocess.run(command, *args, **kwargs)


@fails_open(lambda backend: None)
def hook(backend: NineToothedBackend | None) -> None:
    """Idempotent. `backend`: None in a process of a build's pool, where only a trace is recorded."""
    if name := differing("ninetoothed", _NEEDED):
        notices.tell(f"this NineToothed's {name.replace(':', '.')} differs: its kernels are compiled by each rank")
        return
    package = {name: sys.modules[f"ninetoothed.{name}"] for name in {each.partition(":")[0] for each in _NEEDED}}
    make, build = package["make"], package["build"]  # the package's attributes of these names are functions
    if is_wrapped(make.aot):
        return
    sources.hook(package["generation"], package["jit"], package["tensor"], package["symbol"])
    vars(package["aot"])["subprocess"] = _Subprocess()
    vars(make)["aot"] = _making(make.aot, backend)
    if backend is not None:
        shared = _building(build, backend)
        vars(build)["build"] = vars(sys.modules["ninetoothed"])["build"] = shared


def _making(native: Any, backend: NineToothedBackend | None) -> Any:
    """`aot`, which ``make(caller="cuda")`` calls, and so each process of a build's pool."""
    signature = inspect.signature(native)

    @wraps(native)
    def aot(*args: Any, **kwargs: Any) -> Any:
        bound, calls = signature.bind(*args, **kwargs), traces.calls
        bound.apply_defaults()
        given = bound.arguments
        if calls.traced is not None:
            calls.traced.append(traces.of_call(given))
            return None
        if calls.recorded is not None:
            traces.record(given, calls.recorded)
        if calls.recorded is not None or backend is None:
            return native(**given)

        def compile(directory: Path, records: Path) -> Any:
            traces.record(given, records)
            return native(**{**given, "output_dir": directory})

        request = _request(given, lambda: [{"trace": traces.of_call(given)}], compile)
        return native(**given) if request is None else backend.obtain(request, lambda: native(**given))

    return aot


def _building(module: Any, backend: NineToothedBackend) -> Any:
    native = module.build

    @functools.wraps(native)
    def build(premake: Any, configs: Any, **kwargs: Any) -> Any:
        configs = tuple(configs)  # it may be an iterator
        if kwargs.pop("lazy", False):  # NineToothed would first load what lies in the directory
            return module._LazyKernel(lambda: build(premake, configs, **kwargs))

        def natively() -> Any:
            return native(premake, configs, **kwargs)

        request = library_of(native, premake, configs, **kwargs)
        return natively() if request is None else backend.obtain(request, natively)

    return build


def library_of(native: Any, premake: Any, configs: Any, **kwargs: Any) -> Library | None:
    """The request of these arguments of `build`, which `native` is. None as for `_request`."""
    bound = inspect.signature(native).bind(premake, configs, **kwargs)
    bound.apply_defaults()
    given = {**bound.arguments, "caller": bound.arguments["caller"] or "cuda"}

    def compile(directory: Path, records: Path) -> Any:
        return native(traces.Premake(premake, records), configs, **{**kwargs, "output_dir": directory})

    return _request(given, lambda: traces.of_build(sys.modules[native.__module__], given), compile)


@fails_open(lambda *arguments: None)
def _request(
    given: Mapping[str, Any], trace: Callable[[], list[dict[str, Any]]], compile: Callable[[Path, Path], Any]
) -> Library | None:
    """None if kcoord is off, or NineToothed is to say itself that something is wrong."""
    from kcoord.backends.ninetoothed.backend import Library

    name, output = given["kernel_name"], given["output_dir"]
    if coordinator_in_use() is None or not isinstance(name, str) or output is None or not Path(output).is_dir():
        return None
    return Library(name, Path(output), given, trace, compile)
