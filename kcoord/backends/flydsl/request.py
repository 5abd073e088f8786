"""A request for a traced module of FlyDSL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Traced:
    """A traced module, and how it is to be compiled.

    `ir` is its text, without source lines unless these are compiled into the code. `compile` runs FlyDSL's compiler on it.
    """

    module: Any = field(repr=False)
    ir: str = field(repr=False)
    arch: str
    function: str
    links: tuple[str, ...]
    hints: Mapping[str, Any]
    compile: Callable[[], Any] = field(repr=False)
