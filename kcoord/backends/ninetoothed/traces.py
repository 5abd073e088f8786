"""The trace of a library: all that NineToothed generates for its kernels, made here, without compiling and without a GPU.

`build` makes each kernel in a process of a pool, which imports the script anew: a global that the script has changed since is
not changed there. So these processes record what they traced, and a library that differs from the trace in its key stays with
this rank. They need not know of kcoord: `Premake`, which they are sent, hooks NineToothed there.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import threading
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kcoord.backends.fail_open import fails_open
from kcoord.backends.ninetoothed import sources
from kcoord.backends.reliances import Part, unknown_argument
from kcoord.backends.wrapping import is_wrapped, wraps
from kcoord.errors import KeyFactorError

LIBRARIES = Part("ninetoothed", "ninetoothed", "kernels", {
    "aot:_HEADER_CONTENT": "",
    "aot:_HEADER_PATH": "",
    "aot:_load_launch_func": "_ _",
    "build:_LazyKernel": "_",
    "build:_make": "_ _ caller= kernel_name= output_dir=",
    "build:build": "premake configs meta_parameters= caller= kernel_name= output_dir= ...",
    "generation:CACHE_DIR": "",
    "generation:CodeGenerator.__call__": "self _ _ _ _ _ max_num_configs= prettify=",
    "generation:cache_source": "source",
    "jit:import_from_path": "module_name file_path",
    "make:aot": "func= caller= kernel_name= output_dir= num_warps= num_stages= ...",
    "symbol:block_size._num_block_sizes": "",
    "tensor:Tensor.num_instances": "",
})  # fmt: skip
MADE_OF, BUILT_OF = LIBRARIES.parameters("make:aot"), LIBRARIES.parameters("build:build") | {"lazy"}
"""Arguments of `aot`, which a trace holds, and of `build`."""
_UNBOUNDED = 1 << 62  # elements of a block: the device is in the key apart

Trace = dict[str, Any]
"""All that one kernel's library is made of, by name, as factors of a key."""


class _Calls(threading.local):
    """This thread's calls of `aot`: `traced` collects traces, and nothing is compiled; `recorded` is a directory of digests."""

    traced: list[Trace] | None = None
    recorded: Path | None = None


calls = _Calls()


def of_build(build: Any, given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The trace of each configuration of a build, and what the build does with it. `build` is NineToothed's module.

    Raises `KeyFactorError` for a library that no key can hold, and whatever the script and NineToothed raise.
    """
    if given["meta_parameters"] is not None:
        raise KeyFactorError("an autotuned library names a file of its directory, and adds to it while it runs")
    premake = given["premake"]

    @functools.wraps(premake)
    def apart(*args: Any, **kwargs: Any) -> Any:
        arrangement, application, tensors = premake(*args, **kwargs)
        return arrangement, _copied(application), tensors

    found = []
    options = {name: given[name] for name in ("caller", "kernel_name")}
    outer, calls.traced = calls.traced, []
    try:
        for config in given["configs"]:
            del calls.traced[:]
            _, parameters, combination, *_ = build._make(apart, config, **options, output_dir=Path(given["output_dir"]))
            (trace,) = calls.traced
            found.append({"trace": trace, "parameters": list(parameters), "combination": combination})
    finally:
        calls.traced = outer
    return found


def _copied(function: Any) -> Any:
    """`make` writes annotations into the function that it is given; without kcoord it would in another process."""
    if not isinstance(function, types.FunctionType):
        raise KeyFactorError(f"its application is a {type(function).__name__}")
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    vars(made).update(vars(function))
    return made


def of_call(given: Mapping[str, Any]) -> Trace:
    """The trace of a call of `aot` with these arguments. Raises as `of_build` does."""
    function, generation = given["func"], sys.modules["ninetoothed.generation"]
    if any(getattr(each.source, "jagged_dim", None) is not None for each in inspect.get_annotations(function).values()):
        raise KeyFactorError("a trace changes the shape of a jagged tensor")
    generator = generation.CodeGenerator.__new__(generation.CodeGenerator)  # its constructor asks the GPU
    generator._min_num_elements, generator._max_num_elements = 1, _UNBOUNDED
    options = [given[name] for name in ("caller", "kernel_name", "num_warps", "num_stages")]
    path = generator(function, *options, max_num_configs=None, prettify=False)
    return {
        "source": sources.canonical(Path(path).read_text("utf-8")),
        "function": function.__name__,
        "tensors": [_described(tensor) for tensor in generator.tensors],
        "options": options,
    }


def _described(tensor: Any) -> list[Any]:
    """The types of a tensor, which the source leaves out."""
    return [tensor.source.ndim, str(tensor.source.dtype), tensor.constexpr, tensor.value]


def digest_of(trace: Trace) -> str:
    """The digest by which processes of the pool report their traces."""
    return hashlib.sha256(repr(trace).encode("utf-8", "surrogatepass")).hexdigest()


@fails_open(lambda given, place: None)
def record(given: Mapping[str, Any], place: Path) -> None:
    """Record the trace of a call of `aot`, in a process of the pool or in the leader."""
    try:
        trace = of_call(given)
    except KeyFactorError:
        return
    (place / digest_of(trace)).touch()


# The hooks that trace and record.


def hook() -> bool:
    """Trace or record the compiles of this process, as `calls` states. Idempotent. Returns False for an unknown release."""
    if not LIBRARIES.holds():
        return False
    package = {
        name: sys.modules[f"ninetoothed.{name}"] for name in {each.partition(":")[0] for each in LIBRARIES.calls}
    }
    if not is_wrapped(package["make"].aot):
        sources.hook(package["generation"], package["jit"], package["tensor"], package["symbol"])
        vars(package["make"])["aot"] = _recording(package["make"].aot)
    return True


def _recording(native: Any) -> Any:
    """`aot`, which ``make(caller="cuda")`` calls, and so each process of a build's pool."""
    signature = inspect.signature(native)

    @wraps(native)
    def aot(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        other = unknown_argument(bound, MADE_OF)
        bound.apply_defaults()
        if calls.traced is not None:
            if other:
                raise KeyFactorError(f"no key holds its {other}")
            calls.traced.append(of_call(bound.arguments))
            return None
        if calls.recorded is not None and not other:
            record(bound.arguments, calls.recorded)
        return native(*args, **kwargs)

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
        calls.recorded = self._place
