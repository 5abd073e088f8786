"""Cooperative warm-up: the ranks compile a profile's keys together, each another one, and then have them all.

Every rank has the same list, longest first, and walks it from another place. A key that another rank is at is passed over, not
waited for; so the ranks share the work by themselves, whatever their number, their speed and their fate. Nobody looks at caches
to decide who does what. When nothing is left to begin, each rank waits, bounded, for what the others are still at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from kcoord.api import connect
from kcoord.backends.base import notices
from kcoord.errors import KcoordError
from kcoord.keys.device import GPUTarget
from kcoord.profiles.parts import load_profile
from kcoord.profiles.recipe import Recipe

_REPLAYERS = {"triton": "kcoord.backends.triton_recipes", "python": "kcoord.warmup.calls"}
_RANKS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))

Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A `kcoord.compile_once` function and the arguments to compile it for."""


@dataclass
class Report:
    """What one rank did: keys that it compiled, and found compiled; keys that other ranks were still at when it gave up waiting;
    `failed` names what could not be imported or compiled, with the reason; `seconds` of wall time."""

    compiled: int = 0
    loaded: int = 0
    left: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        parts = [f"{self.compiled} compiled", f"{self.loaded} loaded"]
        parts += [f"{self.left} left to others"] if self.left else []
        parts += [f"{len(self.failed)} skipped"] if self.failed else []
        return f"{', '.join(parts)} in {self.seconds:.1f} s"


def warmup(
    what: str | Iterable[Recipe | Call],
    *,
    targets: Sequence[str] = (),
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Compile, together with the other ranks, a profile by name, or recipes, or ``(function, arguments)`` pairs.

    Every rank may call it, or some, or one; the lists may differ. `targets` (``cuda:90``, ``hip:gfx942``) replace those that
    were recorded, and need no GPU. ``progress(done, all)`` is told after each key. A recipe that does not import or compile here
    is reported and skipped, and so is a profile that is not there yet, or cannot be read: nothing of it can fail a job. Raises
    ValueError for what is no target. Not guaranteed: that everything is compiled when it returns; what is missing is compiled
    when it is first used, as ever.
    """
    begun, report = time.perf_counter(), Report()
    parsed = [GPUTarget.parse(target) for target in targets]
    items = _recipes(what) if isinstance(what, str) else list(what)
    tasks = [task for item in items for task in _tasks(item, parsed)]
    done = 0

    def tell() -> None:
        if progress is not None:
            progress(done, len(tasks))

    busy = []
    for task in _from_my_place(tasks):
        how = _try(task, False, report)
        if how == "busy":
            busy.append(task)
        else:
            done += 1
            tell()
    deadline = time.monotonic() + connect().settings.max_wait
    for task in busy:
        if time.monotonic() > deadline or _try(task, True, report) == "busy":
            report.left += 1
        done += 1
        tell()
    report.seconds = time.perf_counter() - begun
    return report


def _recipes(name: str) -> list[Recipe]:
    settings = connect().settings
    if settings.disable:
        return []
    try:
        return load_profile(settings, name, notices)
    except KcoordError as error:
        notices.tell(f"nothing is warmed up: {error}")
        return []


@dataclass(frozen=True)
class _Task:
    name: str
    run: Callable[[bool], str]
    """``run(waits)`` is ``compiled``, ``loaded`` or ``busy``; it raises what the compiler raises."""


def _tasks(item: Recipe | Call, targets: list[GPUTarget]) -> list[_Task]:
    if not isinstance(item, Recipe):
        function, arguments = item
        name = getattr(function, "__qualname__", repr(function))
        return [_Task(name, lambda waits: _of("python").replay_call(function, tuple(arguments), {}, waits))]
    name = f"{item.module}.{item.qualname}"
    if item.backend == "python":
        return [_Task(name, lambda waits: _of("python").replay(item, waits))]
    if item.backend not in _REPLAYERS:
        notices.tell(f"{name}: this kcoord has no backend {item.backend!r}; its recipes are skipped")
        return []
    wanted: list[GPUTarget | str] = [*targets] or [item.target]
    return [_for_target(name, item, target) for target in wanted]


def _for_target(name: str, recipe: Recipe, target: GPUTarget | str) -> _Task:
    """A recorded target is text, and as little trusted as the rest of its recipe."""

    def run(waits: bool) -> str:
        parsed = GPUTarget.parse(target) if isinstance(target, str) else target
        how: str = _of(recipe.backend).replay(recipe, parsed, waits)
        return how

    return _Task(f"{name} for {target}", run)


def _of(backend: str) -> Any:
    return import_module(_REPLAYERS[backend])


def _try(task: _Task, waits: bool, report: Report) -> str:
    """Where a recipe's own troubles end: its module may raise anything, even SystemExit, and so may its compiler."""
    try:
        how = task.run(waits)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - see above
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        report.failed.append((task.name, reason))
        notices.tell(f"warm-up skips {task.name}: {reason}")
        return "failed"
    if how == "compiled":
        report.compiled += 1
    elif how == "loaded":
        report.loaded += 1
    return how


def _from_my_place(tasks: list[_Task]) -> list[_Task]:
    """My share first, longest first; then the others', begun at another place by each rank."""
    rank, world = _rank_and_world()
    mine, others = tasks[rank::world], [t for n, t in enumerate(tasks) if n % world != rank]
    begin = len(others) * rank // world
    return mine + others[begin:] + others[:begin]


def _rank_and_world() -> tuple[int, int]:
    for rank, world in _RANKS:
        found = os.environ.get(rank, ""), os.environ.get(world, "")
        if all(f.isdecimal() for f in found) and int(found[1]) > 0:
            return int(found[0]) % int(found[1]), int(found[1])
    return 0, 1
