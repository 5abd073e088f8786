"""A library that NineToothed is to build, as a request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kcoord.backends.ninetoothed.gpus import Gpu


@dataclass(eq=False)
class Library:
    """A library to build. `output` is the directory that the user named; `given` are the arguments of ``build`` or ``make``.

    ``compile(directory, records)`` is NineToothed's, into another directory; it records in `records` what it traces. Steps note
    `traces` and `gpu`, which are in the key, and `made`: digests of the traces that were compiled.
    """

    name: str
    output: Path
    given: Mapping[str, Any]
    trace: Callable[[], list[dict[str, Any]]]
    compile: Callable[[Path, Path], Any]
    traces: list[dict[str, Any]] = field(default_factory=list)
    gpu: Gpu | None = None
    made: set[str] = field(default_factory=set)
