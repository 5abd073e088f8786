"""Cooperative warm-up: the ranks compile different keys of a profile at once, until each rank has all of them.

Every rank has the same list, longest first, and walks it in an order of its own (`kcoord.profiles.order`). It skips a key that
another rank is compiling, so the ranks share the work whatever their number and speed, and whichever of them die. No rank looks
at caches to divide the work. At the end of its list, each rank waits, bounded, for the keys that others are still compiling.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kcoord.backends.fail_open import notices
from kcoord.backends.registry import compiler_of, install
from kcoord.errors import KcoordError, StoreError
from kcoord.files.daemon import in_daemon
from kcoord.keys.device import GPUTarget
from kcoord.profiles.order import order
from kcoord.profiles.parts import profile_names
from kcoord.profiles.recipe import Recipe
from kcoord.rank.connect import connect
from kcoord.ranks import ranks_of
from kcoord.telemetry.progress import shown
from kcoord.warmup.overview import Overview
from kcoord.warmup.profile_access import readable, recorded
from kcoord.warmup.tasks import Call, distinct, tasks_of
from kcoord.warmup.tasks import Task as Task

T = TypeVar("T")
_LONGEST_READ = 30.0  # seconds; a rank itself reads nothing but profiles in the store, which may hang
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # one exists if the machine has a GPU


@dataclass
class Report:
    """The work of one rank: keys that it compiled, that it found compiled, and that other ranks were still compiling when it
    stopped waiting; `failed` has the name of each task that could not be imported or compiled, and the reason; `seconds` of wall
    time."""

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
    profile_or_recipes: str | Iterable[Recipe | Call],
    *,
    targets: Sequence[str] = (),
    progress: Callable[[int, int], None] | bool = True,
) -> Report:
    """Compile, together with the other ranks, a profile by name, or recipes, or ``(function, arguments)`` pairs.

    All ranks may call it, or some, or one; the lists may differ. `targets` (``cuda:90``, ``hip:gfx942``) replace the recorded
    ones, and need no GPU. Rank 0 shows the whole job's progress on stderr, unless ``progress=False``; with a function
    ``progress(done, total)`` each rank calls that after each key instead. A recipe that does not import or compile here is
    skipped with a notice, and so is a profile that does not exist yet or cannot be read: nothing of it can fail a job. Hooks
    the compilers of its recipes; does nothing where kcoord is off. Raises ValueError for a malformed target. Not guaranteed:
    that everything is compiled when it returns; the rest is compiled when it is used.
    """
    begun = time.perf_counter()
    parsed = [GPUTarget.parse(target) for target in targets]
    coordinator = connect()
    if not coordinator.usable:
        return Report()  # nothing would keep the artifacts
    if not isinstance(profile_or_recipes, str):
        return _warm_up("warm-up", list(profile_or_recipes), parsed, progress, begun)
    name = profile_or_recipes
    coordinator.pool.retire()
    return _warm_up(f"warm-up {name}", _recipes(name), parsed, progress, begun)


def replay() -> Report | None:
    """Warm up the profile that this job records, before its script begins; None if nothing was recorded yet.

    On a machine with GPUs it skips recipes for the current device: the script has yet to choose one, and a look initializes CUDA,
    after which the script sets ``CUDA_VISIBLE_DEVICES`` too late.
    """
    begun = time.perf_counter()
    coordinator = connect()
    name = coordinator.settings.recorded_as
    if name is None or not coordinator.usable:
        return None
    coordinator.pool.retire()
    try:
        if not _read(lambda: name in profile_names(readable(coordinator.settings, name))):
            return None
    except KcoordError as error:
        notices.tell(f"nothing is warmed up: {error}")
        return None
    recipes = _recipes(name)
    if any(Path(gpu).exists() for gpu in _GPUS):
        recipes = [recipe for recipe in recipes if recipe.target]
    return _warm_up(f"warm-up {name}", recipes, [], True, begun)


def _warm_up(
    title: str,
    items: Sequence[Recipe | Call],
    targets: Sequence[GPUTarget],
    progress: Callable[[int, int], None] | bool,
    begun: float,
) -> Report:
    rank, world = _rank_and_world()
    tasks = [task for item in distinct(_shareable(items), targets) for task in tasks_of(item, targets)]
    with _shown(progress, title, tasks, rank, world) as advance:
        report = walk(tasks, rank, world, connect().settings.max_wait, advance)
    report.seconds = time.perf_counter() - begun
    return report


@contextmanager
def _shown(
    progress: Callable[[int, int], None] | bool, title: str, tasks: Sequence[Task], rank: int, world: int
) -> Iterator[Callable[[int, int], None] | None]:
    """Yields a function that the walk calls after each key."""
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress or rank or not tasks:
        yield None
        return
    overview = Overview(connect(), len(tasks))
    with shown(title, [task.seconds for task in tasks], world, overview.look):
        yield overview.advance


def walk(
    tasks: Sequence[Task], rank: int, world: int, max_wait: float, progress: Callable[[int, int], None] | None = None
) -> Report:
    """Run `tasks`, which all ranks have, longest first, in the order of `rank`; at the end, wait for the other ranks.

    No wait begins after `max_wait` seconds; each has the bounds of a claim. ``progress(done, total)`` is called after each key.
    """
    report, done = Report(), 0

    def advance() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, len(tasks))

    busy = []
    for task in order(tasks, rank, world):
        if _try(task, False, report) == "busy":
            busy.append(task)
        else:
            advance()
    deadline = time.monotonic() + max_wait
    for task in busy:
        if time.monotonic() > deadline or _try(task, True, report) == "busy":
            report.left += 1
        advance()
    return report


def _recipes(name: str) -> list[Recipe]:
    settings = connect().settings
    try:
        return _read(lambda: recorded(settings, name, notices))
    except KcoordError as error:
        notices.tell(f"nothing is warmed up: {error}")
        return []


def _read(read: Callable[[], T]) -> T:
    """The result of `read`, or the `KcoordError` that it raises. Raises `StoreError` if it takes too long, and lets go of it."""
    reading = in_daemon(read)
    if not wait({reading}, timeout=_LONGEST_READ).done:
        raise StoreError(f"profiles could not be read within {_LONGEST_READ:g} s: does the file system hang?")
    return reading.result()


def _shareable(items: Sequence[Recipe | Call]) -> Sequence[Recipe | Call]:
    """Without the recipes of compilers that are not hooked, and so not shared: each rank would compile all of them."""
    compilers = [compiler_of(item.backend) if isinstance(item, Recipe) else None for item in items]
    needed = {compiler.name for compiler in compilers if compiler is not None and compiler.modules}
    unhooked = needed - set(install()) if needed else needed
    pairs = zip(items, compilers, strict=True)
    return [item for item, compiler in pairs if compiler is None or compiler.name not in unhooked]


def _try(task: Task, waits: bool, report: Report) -> str:
    """Run a task; an error ends here. A recipe's module may raise anything, even SystemExit, and so may its compiler."""
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
    ranks = ranks_of(os.environ)
    if ranks.rank is None or not ranks.world:
        return 0, 1
    return ranks.rank % ranks.world, ranks.world
