"""Cooperative warm-up: the ranks compile a profile's keys together, each another one, and then have them all.

Every rank has the same list, longest first, and goes through it in an order of its own (`kcoord.warmup.order`). A key that
another rank is at is passed over, not waited for; so the ranks share the work by themselves, whatever their number, their speed
and their fate. Nobody looks at caches to decide who does what. When nothing is left to begin, each rank waits, bounded, for what
the others are still at.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from kcoord.api import connect
from kcoord.backends.base import notices
from kcoord.errors import KcoordError
from kcoord.keys.device import GPUTarget
from kcoord.profiles.parts import load_profile
from kcoord.profiles.recipe import Recipe
from kcoord.telemetry.progress import shown
from kcoord.warmup.order import order
from kcoord.warmup.overview import Overview
from kcoord.warmup.tasks import Call, tasks_of
from kcoord.warmup.tasks import Task as Task

_RANKS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


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
    progress: Callable[[int, int], None] | bool = True,
) -> Report:
    """Compile, together with the other ranks, a profile by name, or recipes, or ``(function, arguments)`` pairs.

    Every rank may call it, or some, or one; the lists may differ. `targets` (``cuda:90``, ``hip:gfx942``) replace those that
    were recorded, and need no GPU. While it lasts, rank 0 shows on stderr how far the whole job is; not with
    ``progress=False``, and with a function ``progress(done, all)`` each rank calls that after each key instead. A recipe that
    does not import or compile here is reported and skipped, and so is a profile that is not there yet, or cannot be read: nothing
    of it can fail a job. Raises ValueError for what is no target. Not guaranteed: that everything is compiled when it returns;
    what is missing is compiled when it is first used, as ever.
    """
    begun = time.perf_counter()
    parsed = [GPUTarget.parse(target) for target in targets]
    items = _recipes(what) if isinstance(what, str) else list(what)
    tasks = [task for item in items for task in tasks_of(item, parsed)]
    coordinator, (rank, world) = connect(), _rank_and_world()
    coordinator.ahead.retire()
    with _told(progress, what, tasks, rank, world) as tell:
        report = walk(tasks, rank, world, coordinator.settings.max_wait, tell)
    report.seconds = time.perf_counter() - begun
    return report


@contextmanager
def _told(
    progress: Callable[[int, int], None] | bool, what: object, tasks: Sequence[Task], rank: int, world: int
) -> Iterator[Callable[[int, int], None] | None]:
    """Yields what the walk is to call after each key."""
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress or rank or not tasks or connect().settings.disable:
        yield None
        return
    overview = Overview(connect(), len(tasks))

    def walked(done: int, every: int) -> None:
        overview.walked = done

    title = f"warm-up {what}" if isinstance(what, str) else "warm-up"
    with shown(title, [task.seconds for task in tasks], world, overview.look):
        yield walked


def walk(
    tasks: Sequence[Task], rank: int, world: int, max_wait: float, progress: Callable[[int, int], None] | None = None
) -> Report:
    """One rank's way through `tasks`, which all ranks have, longest first; at its end it waits `max_wait` seconds at most."""
    report, done = Report(), 0

    def tell() -> None:
        if progress is not None:
            progress(done, len(tasks))

    busy = []
    for task in order(tasks, rank, world):
        how = _try(task, False, report)
        if how == "busy":
            busy.append(task)
        else:
            done += 1
            tell()
    deadline = time.monotonic() + max_wait
    for task in busy:
        if time.monotonic() > deadline or _try(task, True, report) == "busy":
            report.left += 1
        done += 1
        tell()
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


def _try(task: Task, waits: bool, report: Report) -> str:
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


def _rank_and_world() -> tuple[int, int]:
    for rank, world in _RANKS:
        found = os.environ.get(rank, ""), os.environ.get(world, "")
        if all(f.isdecimal() for f in found) and int(found[1]) > 0:
            return int(found[0]) % int(found[1]), int(found[1])
    return 0, 1
