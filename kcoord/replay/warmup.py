"""Warm-up: a process and its node's pool compile recipes before anybody needs them, each key once in the job.

The caller announces its recipes, and takes them from the job's queue in the agent until none is left that nobody has begun; then
it waits, bounded, for those that others compile. Callers of a node share one queue; nodes begin with different shares of it. The
first recipe that is not there yet starts the pool, if the callers leave cores idle. So a caller never depends on the pool, nor
on other callers: it compiles all that they do not.

Recipes for the current GPU, and calls that no recipe can hold, are not in the queue: each caller walks them by itself, and
passes over what another process is compiling.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import closing
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from kcoord.backends.fail_open import notices
from kcoord.backends.python.recipes import recipe_of, replay_call
from kcoord.cgroups import cores
from kcoord.errors import KcoordError, StoreError
from kcoord.files.daemon import in_daemon
from kcoord.keys.device import GPUTarget
from kcoord.profiles.choices import KIND
from kcoord.profiles.parts import profile_names
from kcoord.profiles.recipe import MOST_AT_ONCE, Recipe
from kcoord.protocol.messages import Announce, Granted, Next, Work
from kcoord.rank.client import AgentClient
from kcoord.rank.connect import connect
from kcoord.rank.coordinator import Coordinator
from kcoord.ranks import nodes_of, ranks_of
from kcoord.replay.profile_access import readable, recorded
from kcoord.replay.recipes import name_of, replayable, replayed, settled
from kcoord.telemetry.progress import Look, shown

T = TypeVar("T")
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A `kcoord.compile_once` function and the arguments to compile it for."""
_Own = tuple[str, Callable[[bool], tuple[str, str]]]
"""A name, and a function that compiles: ``run(waits)`` returns what `settled` does."""
_MOST_BYTES = 1 << 20  # of the recipes in one message
_LONGEST_READ = 30.0  # seconds; a rank itself reads nothing but profiles in the store, which may hang
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""One of them exists if the machine has a GPU. Asking the compilers would initialize it."""


@dataclass
class Report:
    """The work of one process: keys that it compiled, or the pool that it started; keys that it found compiled; and keys that
    others were still compiling when it stopped waiting. `failed` has the name of each recipe that could not be imported or
    compiled, and the reason; `seconds` of wall time."""

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
    """Compile, with the other ranks and on idle cores, a profile by name, or recipes, or ``(function, arguments)`` pairs.

    All ranks may call it, or some, or one; the lists may differ. `targets` (``cuda:90``, ``hip:gfx942``) replace the recorded
    ones, and need no GPU. Rank 0 shows its node's progress on stderr, unless ``progress=False``; with a function ``progress(done,
    total)`` each rank calls that for each key instead. The pool has as many workers as cores are left by the node's ranks,
    whatever KCOORD_POOL_WORKERS says. A recipe that does not import or compile here is skipped with a notice, and so is a profile
    that does not exist yet or cannot be read: nothing of it can fail a job. Hooks the compilers of its recipes; does nothing
    where kcoord is off; without an agent each process compiles all of it. Raises ValueError for a malformed target. Not
    guaranteed: that everything is compiled when it returns; the rest is compiled when it is used.
    """
    return warm_up(profile_or_recipes, targets, progress)


def warm_up(
    profile_or_recipes: str | Iterable[Recipe | Call],
    targets: Sequence[str],
    progress: Callable[[int, int], None] | bool,
    workers: int | None = None,
    tell: Callable[[str], object] = notices.tell,
) -> Report:
    """As `warmup`, with a pool of `workers`, and ``tell(line)`` for each recipe that is skipped."""
    begun = time.perf_counter()
    parsed = [str(GPUTarget.parse(target)) for target in targets]
    if not connect().usable:
        return Report()  # nothing would keep the artifacts
    if not isinstance(profile_or_recipes, str):
        return _warm_up("warm-up", list(profile_or_recipes), begun, parsed, progress, workers, tell)
    name = profile_or_recipes
    return _warm_up(f"warm-up {name}", _recipes(name), begun, parsed, progress, workers, tell)


def replay(gpu_files: Sequence[str] = GPU_FILES) -> Report | None:
    """Warm up the profile that this job records, before its script begins; None if nothing was recorded yet.

    On a machine with GPUs it skips recipes for the current device: the script has yet to choose one, and a look initializes CUDA,
    after which the script sets ``CUDA_VISIBLE_DEVICES`` too late.
    """
    begun = time.perf_counter()
    settings = connect().settings
    name = settings.recorded_as
    if name is None or not connect().usable:
        return None
    try:
        if not _read(lambda: name in profile_names(readable(settings, name))):
            return None
    except KcoordError as error:
        notices.tell(f"nothing is warmed up: {error}")
        return None
    recipes = _recipes(name)
    if _has_gpu(gpu_files):
        recipes = [recipe for recipe in recipes if recipe.target]
    return _warm_up(f"warm-up {name}", recipes, begun)


def _warm_up(
    title: str,
    items: Sequence[Recipe | Call],
    begun: float,
    targets: Sequence[str] = (),
    progress: Callable[[int, int], None] | bool = True,
    workers: int | None = None,
    tell: Callable[[str], object] = notices.tell,
) -> Report:
    coordinator = connect()
    shared, own = _divided(items, targets)
    walk = Walk(coordinator, len(shared) + len(own), progress if callable(progress) else None, tell)
    ranks, nodes = ranks_of(), nodes_of()
    node = (ranks.rank or 0) * nodes // max(1, ranks.world or 1)
    callers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    workers = max(0, int(cores()) - callers) if workers is None else workers
    shows = progress is True and ranks.rank in (None, 0)
    seconds = [recipe.seconds for recipe in shared] + [0.0] * len(own) if shows else []
    with (
        closing(AgentClient(coordinator.settings, coordinator.notices)) as client,
        coordinator.pool.warms_up(workers) as pool,
        shown(title, seconds, callers + workers, walk.look),
    ):
        if shared and not announced(client, shared, node, nodes, workers):
            own, shared = [*own, *map(_own, shared)], []
        busy = [each for each in own if not walk.passes(*each)]
        pooled = walk.queue(client, len(shared))
        if pool.has_started:  # else another caller counts them
            walk.report.compiled, walk.report.loaded = walk.report.compiled + pooled, walk.report.loaded - pooled
        walk.end(busy)
    walk.report.seconds = time.perf_counter() - begun
    return walk.report


def _replayed(recipe: Recipe, waits: bool) -> tuple[str, str]:
    return replayed(recipe, waits=waits)


class Walk:
    """One caller's way through `total` keys, and how far it is."""

    def __init__(
        self,
        coordinator: Coordinator,
        total: int,
        progress: Callable[[int, int], None] | None = None,
        tell: Callable[[str], object] = notices.tell,
    ) -> None:
        self.report = Report()
        self._coordinator, self._total, self._progress, self._tell = coordinator, total, progress, tell
        self._own = self._own_compiled = 0  # keys that are not in the queue
        self._done = self._compiled = 0  # of all keys: that are settled, and that processes of this node compiled
        self._deadline: float | None = None

    def passes(self, name: str, run: Callable[[bool], tuple[str, str]], waits: bool = False) -> bool:
        """Run one that is not in the queue. False if another process is at it."""
        how = self._settled(name, *run(waits))
        if how == "busy":
            return False
        self.report.loaded += how == "loaded"
        self._own, self._own_compiled = self._own + 1, self._own_compiled + (how == "compiled")
        self._reached(self._done + 1, self._compiled + (how == "compiled"))
        return True

    def queue(
        self, client: AgentClient, count: int, replay: Callable[[Recipe, bool], tuple[str, str]] = _replayed
    ) -> int:
        """Take what is left of the `count` keys in the queue. Returns the number that workers of the pool compiled."""
        ended, left, pooled, here = "", count, 0, 0
        while count:
            given = client.ask(Next(ended), Work, quietly=True, start=False)
            if given is None:  # the agent has gone, or is another one
                left -= ended in ("compiled", "loaded", "failed")
                break
            left, pooled = given.left, given.pooled
            self._reached(self._own + count - left, self._own_compiled + given.compiled)
            if given.recipe is None or (given.waits and self._is_late()):
                break
            recipe = Recipe.from_wire(given.recipe)
            ended = self._settled(name_of(recipe), *replay(recipe, given.waits))
            here += ended in ("compiled", "failed")
        self.report.left += left
        self.report.loaded += count - left - here
        return pooled

    def end(self, busy: Iterable[_Own]) -> None:
        """Wait for those of `passes` that others were at."""
        for name, run in busy:
            self.report.left += self._is_late() or not self.passes(name, run, True)

    def look(self) -> Look:
        """How far this node is. Asks the agent for its flights."""
        flights = [f for f in (self._coordinator.status() or {}).get("flights", ()) if f.get("state") == "compiling"]
        at = (f"{f['leader']}: {f['name'].partition(':')[2]} {f['seconds']:.1f} s" for f in flights)
        return Look(self._done, self._compiled, tuple(at))

    def _settled(self, name: str, how: str, why: str) -> str:
        if how == "failed":
            self.report.failed.append((name, why))
            self._tell(f"warm-up skips {name}: {why}")
        self.report.compiled += how == "compiled"
        return how

    def _reached(self, done: int, compiled: int) -> None:
        if self._progress is not None:
            for each in range(self._done + 1, done + 1):
                self._progress(each, self._total)
        self._done, self._compiled = max(self._done, done), compiled

    def _is_late(self) -> bool:
        """True `max_wait` seconds after the first wait; each wait has the bounds of a claim."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._coordinator.settings.max_wait
        return now > self._deadline


def _divided(items: Sequence[Recipe | Call], targets: Sequence[str]) -> tuple[list[Recipe], list[_Own]]:
    """Recipes for the queue, longest first; and what each caller walks: choices, and where there is a GPU, what is for it."""
    recipes: list[Recipe] = []
    own: list[_Own] = []
    for item in items:
        recipe = item if isinstance(item, Recipe) else _recipe_of(*item)
        if recipe is not None:
            recipes.append(recipe)
        elif not isinstance(item, Recipe):
            own += [_own_call(*item, target) for target in targets or [""]]
    has_gpu = _has_gpu(GPU_FILES)
    ready = sorted(replayable(recipes, targets), key=lambda recipe: (-recipe.seconds, recipe.order))
    shared = [recipe for recipe in ready if recipe.backend != KIND and (recipe.target or not has_gpu)]
    queued = {recipe.digest for recipe in shared}
    return shared, [*(_own(recipe) for recipe in ready if recipe.digest not in queued), *own]


def _own(recipe: Recipe) -> _Own:
    return name_of(recipe), lambda waits: replayed(recipe, waits=waits)


def _own_call(function: Any, arguments: tuple[Any, ...], target: str) -> _Own:
    at = GPUTarget.parse(target) if target else None
    name = getattr(function, "__qualname__", repr(function))
    return name, lambda waits: settled(lambda: replay_call(function, tuple(arguments), {}, waits, at))


def _recipe_of(function: Any, arguments: tuple[Any, ...]) -> Recipe | None:
    """The recipe of a call; None if none would lead another process to this function."""
    if not hasattr(function, "warm"):
        return None
    recipe = recipe_of(function, tuple(arguments), {}, None, 0.0)
    try:
        found = recipe and attrgetter(recipe.qualname)(sys.modules[recipe.module])
    except (AttributeError, KeyError):
        return None
    return recipe if found is function else None


def announced(client: AgentClient, recipes: Sequence[Recipe], node: int, nodes: int, workers: int) -> bool:
    """Put `recipes` into the queue of the job, for this `client` to take from. False: there is no agent."""
    for frame in _frames(recipes):
        announce = Announce(frame, node=node, nodes=nodes, cores=cores(), waits=True, workers=workers)
        if client.ask(announce, Granted) is None:
            return False
    return True


def _frames(recipes: Iterable[Recipe]) -> Iterator[list[dict[str, Any]]]:
    frame: list[dict[str, Any]] = []
    size = 0
    for recipe in recipes:
        if len(frame) == MOST_AT_ONCE or (frame and size + recipe.size > _MOST_BYTES):
            yield frame
            frame, size = [], 0
        frame.append(recipe.to_wire())
        size += recipe.size
    yield frame


def _has_gpu(files: Sequence[str]) -> bool:
    return any(Path(file).exists() for file in files)


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
