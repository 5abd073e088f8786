"""Requests for libraries, of ``make`` and of ``build``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.backends.fail_open import coordinator_in_use, fails_open
from kcoord.backends.ninetoothed import traces
from kcoord.backends.ninetoothed.gpus import Gpu
from kcoord.backends.ninetoothed.recording import Premake


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
    bound.apply_defaults()
    given = {**bound.arguments, "caller": bound.arguments["caller"] or "cuda"}

    def compile(directory: Path, records: Path) -> Any:
        return native(Premake(premake, records), configs, **{**kwargs, "output_dir": directory})

    return library_of(given, lambda: traces.of_build(sys.modules[native.__module__], given), compile)
