"""Compiles of Triton, as requests: of kernels, and of the C modules that it builds with the host's compiler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kcoord.backends.triton.inputs import Inputs


class Kernel(NamedTuple):
    """One compile, as Triton's `compile` has it in its local variables. `digest` is Triton's key, `home` its directory.

    `problem`: why `digest` does not hold all inputs. `inputs` are as they were when the key was made, and `text` is what Triton
    made it of; `files` are the names that Triton stored.
    """

    name: str
    digest: str
    home: Path
    source: Any
    triton_target: Any
    options: Any
    problem: str = ""
    inputs: tuple[Inputs, ...] = ()
    text: str = ""
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Module:
    """`digest` is Triton's key, of the source; `cache` Triton's cache directory."""

    filename: str
    digest: str
    cache: Path
