"""Declarations of compilers. Launchers, commands and the registry read them without importing a compiler or its adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kcoord.settings import Settings


@dataclass(frozen=True, eq=False)
class Compiler:
    """One compiler, installed or not. A subclass overrides methods where the compiler has an environment or a layout of its own.

    `name` is that of its keys, recipes and statistics: lower-case letters, digits, ``_`` and ``-``. `backend` is its
    `kcoord.backends.Backend`, an object, as ``module:attribute``; empty for a tuner, which shares choices alone. `modules` are
    modules of the compiler, each with the module of its hooks: once a process has imported the first, kcoord imports the second
    and calls its function ``hook()``. `packages` are the distributions that it needs, each with its oldest version, for
    ``kcoord doctor``. `imports` are those of the variables of `child_environ` that name a module of kcoord: where a Python lacks
    it, they would end the job.
    """

    name: str
    backend: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    imports: frozenset[str] = frozenset()

    def obstacle(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """The reason why the compiler must not be hooked in this environment, and the remedy; None if there is none."""
        return None

    def child_environ(self, settings: Settings, environ: Mapping[str, str]) -> Mapping[str, str]:
        """Variables by which the compiler in a child process finds kcoord."""
        return {}

    def tiers(self, environ: Mapping[str, str]) -> Mapping[str, Path]:
        """Directories outside `Settings.local_dir` that hold its artifacts, by the variable that chooses them."""
        return {}
