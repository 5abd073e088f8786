"""Cooperative warm-up: the ranks compile a profile's keys together, each another one, and then have them all.

Every rank has the same list, longest first, and goes through it in an order of its own (`kcoord.warmup.order`). A key that
another rank is at is passed over, not waited for; so the ranks share the work by themselves, whatever their number, their speed
and their fate. Nobody looks at caches to decide who does what. When nothing is left to begin, each rank waits, bounded, for what
the others are still at.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from kcoord.backends.base import notices
from kcoord.backends.registry import install, replayer
from kcoord.errors import KcoordError, StoreError
from kcoord.keys.device import GPUTarget
from kcoord.profiles.parts import load_profile, profile_names
from kcoord.profiles.recipe import Recipe
from kcoord.rank.connect import connect
from kcoord.ranks import ranks_of
from kcoord.telemetry.progress import shown
from kcoord.warmup.order import order
from kcoord.warmup.overview import Overview
from kcoord.warmup.profile_access import readable
from kcoord.warmup.tasks import Call, distinct, tasks_of
from kcoord.warmup.tasks import Task as Task

T = TypeVar("T")
_LONGEST_READ = 30.0  # seconds; profiles are all that a rank itself reads in the store, which may hang
_GPUS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # there if the machine has any


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
    of it can fail a job. It hooks the compilers of its recipes, and does nothing where kcoord is off. Raises ValueError for a
    target that is none. Not guaranteed: that everything is compiled when it returns; what is missing is compiled when it is used.
    """
    begun = time.perf_counter()
    parsed = [GPUTarget.parse(target) for target in targets]
    coordinator = connect()
    if not coordinator.usable:
        return Report()  # what is compiled now would be lost
    if what == coordinator.settings.profile:
        coordinator.ahead.retire()
    title, items = (f"warm-up {what}", _recipes(what)) if isinstance(what, str) else ("warm-up", list(what))
    return _compiled(title, items, parsed, progress, begun)


def replay() -> Report | None:
    """Warm up the profile that this job records, before its script begins; None if nothing was recorded yet.

    Without what is compiled for the current device, on a machine with GPUs: which device that is the script has yet to say, and
    asking initializes CUDA, after which what the script sets (``CUDA_VISIBLE_DEVICES``) comes too late.
    """
    begun = time.perf_counter()
    coordinator = connect()
    name = coordinator.settings.profile
    if name is None or not coordinator.usable:
        return None
    coordinator.ahead.retire()
    try:
        if not _read(lambda: name in profile_names(readable(coordinator.settings, name))):
            return None
    except KcoordError as error:
        notices.tell(f"nothing is warmed up: {error}")
        return None
    recipes = _recipes(name)
    if any(Path(gpu).exists() for gpu in _GPUS):
        recipes = [recipe for recipe in recipes if recipe.target]
    return _compiled(f"warm-up {name}", recipes, [], True, begun)


def _compiled(
    title: str,
    items: Sequence[Recipe | Call],
    targets: Sequence[GPUTarget],
    progress: Callable[[int, int], None] | bool,
    begun: float,
) -> Report:
    rank, world = _rank_and_world()
    tasks = [task for item in distinct(_shareable(items), targets) for task in tasks_of(item, targets)]
    with _told(progress, title, tasks, rank, world) as tell:
        report = walk(tasks, rank, world, connect().settings.max_wait, tell)
    report.seconds = time.perf_counter() - begun
    return report


@contextmanager
def _told(
    progress: Callable[[int, int], None] | bool, title: str, tasks: Sequence[Task], rank: int, world: int
) -> Iterator[Callable[[int, int], None] | None]:
    """Yields what the walk is to call after each key."""
    if not isinstance(progress, bool):
        yield progress
        return
    if not progress or rank or not tasks:
        yield None
        return
    overview = Overview(connect(), len(tasks))

    def walked(done: int, every: int) -> None:
        overview.walked = done

    with shown(title, [task.seconds for task in tasks], world, overview.look):
        yield walked


def walk(
    tasks: Sequence[Task], rank: int, world: int, max_wait: float, progress: Callable[[int, int], None] | None = None
) -> Report:
    """One rank's way through `tasks`, which all ranks have, longest first.

    At its end it waits for others, and begins no wait after `max_wait` seconds; each may last as long.
    """
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
    try:
        return _read(lambda: load_profile(readable(settings, name), name, notices))
    except KcoordError as error:
        notices.tell(f"nothing is warmed up: {error}")
        return []


def _read(read: Callable[[], T]) -> T:
    """What `read` returns, or the `KcoordError` that it raises. Raises `StoreError` if it takes too long, and lets go of it."""
    answers: queue.SimpleQueue[tuple[T] | KcoordError] = queue.SimpleQueue()

    def begin() -> None:
        try:
            answers.put((read(),))
        except KcoordError as error:
            answers.put(error)

    threading.Thread(target=begin, daemon=True).start()
    try:
        answer = answers.get(timeout=_LONGEST_READ)
    except queue.Empty:
        raise StoreError(f"profiles could not be read within {_LONGEST_READ:g} s: does the file system hang?") from None
    if isinstance(answer, KcoordError):
        raise answer
    return answer[0]


def _shareable(items: Sequence[Recipe | Call]) -> Sequence[Recipe | Call]:
    """Without the recipes of compilers that are not hooked, and so not shared: each rank would compile all of them."""
    backends = [replayer(item.backend) if isinstance(item, Recipe) else None for item in items]
    needed = {backend.name for backend in backends if backend is not None and backend.modules}
    unhooked = needed - set(install()) if needed else needed
    pairs = zip(items, backends, strict=True)
    return [item for item, backend in pairs if backend is None or backend.name not in unhooked]


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
    ranks = ranks_of(os.environ)
    if ranks.rank is None or not ranks.world:
        return 0, 1
    return ranks.rank % ranks.world, ranks.world
