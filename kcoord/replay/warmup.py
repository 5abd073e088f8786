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
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from kcoord.backends.fail_open import notices
from kcoord.backends.python.compile_once import recipe_of, replay_call
from kcoord.cgroups import cores
from kcoord.errors import KcoordError, StoreError
from kcoord.files.daemon import in_daemon
from kcoord.keys.device import GPUTarget
from kcoord.packs.recipe import CHOICE, MOST_AT_ONCE, Recipe
from kcoord.protocol.messages import Announce, Granted, Next, Work
from kcoord.rank.client import AgentClient
from kcoord.rank.connect import connect
from kcoord.rank.coordinator import Coordinator
from kcoord.ranks import nodes_of, ranks_of
from kcoord.replay.profile_access import recorded
from kcoord.replay.recipes import name_of, replayable, replayed, settled
from kcoord.telemetry.progress import Look, shown

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
    workers: int | None = None,
    tell: Callable[[str], object] = notices.tell,
) -> Report:
    """Compile, with the other ranks and on all cores, a profile by name, or recipes, or ``(function, arguments)`` pairs.

    All ranks may call it, or some, or one; the lists may differ. `targets` (``cuda:90``, ``hip:gfx942``) replace the recorded
    ones, and need no GPU. Rank 0 shows its node's progress on stderr, unless ``progress=False``; with a function ``progress(done,
    total)`` each rank calls that for each key instead. The pool has `workers` at most; by default as many as cores are left by
    the node's ranks, whatever KCOORD_POOL_WORKERS says. A recipe that does not import or compile here is skipped, which
    ``tell(line)`` says, and so is a profile that does not exist yet or cannot be read: nothing of it can fail a job. Hooks the
    compilers of its recipes; does nothing where kcoord is off; without an agent each process compiles all of it. Raises
    ValueError for a malformed target, TypeError for what is neither a recipe nor a pair. Not guaranteed: that everything is
    compiled when it returns; the rest is compiled when it is used.
    """
    begun, coordinator = time.perf_counter(), connect()
    parsed = [str(GPUTarget.parse(target)) for target in targets]
    if not coordinator.usable:
        return Report()  # nothing would keep the artifacts
    name = profile_or_recipes if isinstance(profile_or_recipes, str) else ""
    given = list(profile_or_recipes) if isinstance(profile_or_recipes, Iterable) else [profile_or_recipes]
    shared, own = divided(_recipes(name, tell) if name else given, parsed)  # type: ignore[arg-type]
    ranks, nodes = ranks_of(), nodes_of()
    node = (ranks.rank or 0) * nodes // max(1, ranks.world or 1)
    callers = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    workers = max(0, int(cores()) - callers if workers is None else workers)
    walk = Walk(coordinator, len(shared) + len(own), progress if callable(progress) else None, tell)
    shows = progress is True and ranks.rank in (None, 0)
    seconds = [recipe.seconds for recipe in shared] + [0.0] * len(own) if shows else []
    with (
        closing(AgentClient(coordinator.settings, coordinator.notices)) as client,
        coordinator.pool.warms_up(workers) as pool,
        shown(f"warm-up {name}".strip(), seconds, callers + workers, walk.look),
    ):
        if shared and not announced(client, shared, node, nodes, workers):
            own, shared = [*own, *map(_own, shared)], []
        busy = [each for each in _mine_first(own, ranks.local or 0, callers) if walk.settle(*each) == "busy"]
        walk.queue(client, len(shared), _own)
        for each in busy:
            walk.report.left += walk.is_late() or walk.settle(*each, waits=True) == "busy"
    found = walk.report
    pooled = walk.pooled if pool.has_started else 0  # else another caller counts them
    return replace(
        found,
        compiled=found.compiled + pooled,
        loaded=found.loaded + walk.others - pooled,
        seconds=time.perf_counter() - begun,
    )


def _mine_first(keys: Sequence[_Own], rank: int, ranks: int) -> list[_Own]:
    """`keys` in the order of one of a node's ranks. In one order, all ranks would wait for the store, key by key."""
    return [key for mine in (True, False) for n, key in enumerate(keys) if (n % ranks == rank) is mine]


class Walk:
    """One caller's way through `total` keys. `others`: keys that other processes of this node settled, of which the pool compiled
    `pooled`."""

    def __init__(
        self,
        coordinator: Coordinator,
        total: int,
        progress: Callable[[int, int], None] | None = None,
        tell: Callable[[str], object] = notices.tell,
    ) -> None:
        self.report, self.others, self.pooled = Report(), 0, 0
        self._coordinator, self._total, self._progress, self._tell = coordinator, total, progress, tell
        self._deadline: float | None = None
        self._told = 0

    @property
    def done(self) -> int:
        """The number of keys that are settled."""
        return self.report.compiled + self.report.loaded + len(self.report.failed) + self.others

    def settle(self, name: str, run: Callable[[bool], tuple[str, str]], waits: bool = False) -> str:
        """Run one, and return how it ended."""
        how, why = run(waits)
        if how == "failed":
            self.report.failed.append((name, why))
            self._tell(f"warm-up skips {name}: {why}")
        self.report.compiled += how == "compiled"
        self.report.loaded += how == "loaded"
        self._say()
        return how

    def queue(self, client: AgentClient, count: int, own: Callable[[Recipe], _Own]) -> None:
        """Take what is left of the `count` keys in the queue. ``own(recipe)`` gives what `settle` takes."""
        ended, mine = "", 0
        while count:
            given = client.ask(Next(ended), Work, quietly=True, start=False)
            if given is None:
                break  # the agent has gone, or is another one
            self.others, self.pooled = count - given.left - mine, given.pooled
            self._say()
            if given.recipe is None or (given.waits and self.is_late()):
                break
            ended = self.settle(*own(Recipe.from_wire(given.recipe)), waits=given.waits)
            mine += ended != "busy"
        self.report.left += count - mine - self.others

    def look(self) -> Look:
        """The state of this node. Asks the agent for its flights."""
        flights = [f for f in (self._coordinator.status() or {}).get("flights", ()) if f.get("state") == "compiling"]
        at = (f"{f['leader']}: {f['name'].partition(':')[2]} {f['seconds']:.1f} s" for f in flights)
        return Look(self.done, self.report.compiled + self.pooled, tuple(at))

    def is_late(self) -> bool:
        """True `max_wait` seconds after the first wait; each wait has the bounds of a claim."""
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._coordinator.settings.max_wait
        return now > self._deadline

    def _say(self) -> None:
        while self._progress is not None and self._told < self.done:
            self._told += 1
            self._progress(self._told, self._total)


def divided(
    items: Sequence[Recipe | Call], targets: Sequence[str], gpu_files: Sequence[str] = GPU_FILES
) -> tuple[list[Recipe], list[_Own]]:
    """Recipes for the queue, longest first; and what each caller walks: choices, and where there is a GPU, what is for it."""
    recipes: list[Recipe] = []
    own: list[_Own] = []
    for item in items:
        is_call = isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], (tuple, list))
        if not is_call and not isinstance(item, Recipe):
            raise TypeError(
                f"{item!r:.80} is no recipe: give a profile's name, recipes, or (function, (argument, …)) pairs"
            )
        recipe = item if isinstance(item, Recipe) else _recipe_of(*item)
        if recipe is not None:
            recipes.append(recipe)
        elif not isinstance(item, Recipe):
            own += [_own_call(*item, target) for target in targets or [""]]
    has_gpu = _has_gpu(gpu_files)
    ready = sorted(replayable(recipes, targets), key=lambda recipe: (-recipe.seconds, recipe.order))
    shared = [recipe for recipe in ready if recipe.backend != CHOICE and (recipe.target or not has_gpu)]
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


def _recipes(name: str, tell: Callable[[str], object]) -> list[Recipe]:
    settings = connect().settings
    reading = in_daemon(lambda: recorded(settings, name, notices))
    try:
        if not wait({reading}, timeout=_LONGEST_READ).done:
            raise StoreError(f"{name} could not be read within {_LONGEST_READ:g} s: does the file system hang?")
        return reading.result()
    except KcoordError as error:
        tell(f"nothing is warmed up: {error}")
        return []
