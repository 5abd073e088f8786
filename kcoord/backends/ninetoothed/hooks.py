"""NineToothed's ``build``, and the ahead-of-time compiles of its ``make``, answered by the backend."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

from kcoord.backends.ninetoothed import traces
from kcoord.backends.ninetoothed.adapter import backend
from kcoord.backends.ninetoothed.request import library_of, of_build
from kcoord.backends.reliances import unknown_argument
from kcoord.backends.wrapping import is_wrapped, wraps


def hook() -> None:
    """Idempotent."""
    if not traces.hook():
        return
    # the package's attributes of these names are functions
    make, build = sys.modules["ninetoothed.make"], sys.modules["ninetoothed.build"]
    if not is_wrapped(build.build):
        vars(make)["aot"] = _making(make.aot)
        vars(build)["build"] = vars(sys.modules["ninetoothed"])["build"] = _building(build)


def _making(native: Any) -> Any:
    """`aot`, as `traces.hook` leaves it."""
    signature = inspect.signature(native)

    @wraps(native)
    def aot(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        other = unknown_argument(bound, traces.MADE_OF)
        bound.apply_defaults()
        given = bound.arguments
        if other or traces.calls.traced is not None or traces.calls.recorded is not None:
            return native(*args, **kwargs)

        def compile(directory: Path, records: Path) -> Any:
            traces.record(given, records)
            return native(**{**given, "output_dir": directory})

        request = library_of(given, lambda: [{"trace": traces.of_call(given)}], compile)
        return native(*args, **kwargs) if request is None else backend.obtain(request, lambda: native(*args, **kwargs))

    return aot


def _building(module: Any) -> Any:
    native = module.build

    @wraps(native)
    def build(premake: Any, configs: Any, **kwargs: Any) -> Any:
        configs = tuple(configs)  # it may be an iterator
        if kwargs.pop("lazy", False):  # NineToothed would first load what lies in the directory
            return module._LazyKernel(lambda: build(premake, configs, **kwargs))

        def natively() -> Any:
            return native(premake, configs, **kwargs)

        request = of_build(native, premake, configs, **kwargs)
        return natively() if request is None else backend.obtain(request, natively)

    return build
