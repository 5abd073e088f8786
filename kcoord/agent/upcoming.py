"""The queue of a job's pool: recipes whose keys the job will ask for. No clock, no I/O."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from kcoord.packs.recipe import TRIED, Recipe

_MOST = 100_000  # recipes
_MOST_TRIES = 12  # of a recipe that others are compiling: some five minutes
_LONGEST_PAUSE = 32  # rounds between two of them


class Timed(Protocol):
    """A recipe; `seconds` is the recorded time of its compile, 0 if unknown."""

    @property
    def seconds(self) -> float: ...


T = TypeVar("T", bound=Timed)


class Upcoming:
    """Each recipe is taken once; first those that ranks are about to use (`now`), then those of profiles, then guesses.

    Of a profile, this node's share comes first: compiles that are long by its record at the front, since the last to end decides
    when all have ended; then the order in which the job asked. The shares of other nodes follow: a node may be slow or absent.
    Last come compiles that the job only tried, to choose among them.
    """

    def __init__(self) -> None:
        # each recipe is in one of these queues, by its digest
        self._now: dict[str, Recipe] = {}
        self._later: dict[str, Recipe] = {}
        self._guessed: dict[str, Recipe] = {}
        self._busy: dict[str, tuple[Recipe, int]] = {}  # compiled by others; with the round in which to retry
        self._again: dict[str, Recipe] = {}  # that round has come
        self._round = 0
        self._tries: dict[str, int] = {}  # digest → how often it was taken; also of those that a rank asked for
        self._recorded: list[Recipe] = []  # all of profiles
        self._targets: set[str] = set()

    def __len__(self) -> int:
        """The recipes that can be taken, at once or after `again`."""
        return len(self._now) + len(self._later) + len(self._guessed) + len(self._busy) + len(self._again)

    @property
    def ready(self) -> bool:
        """True if one can be taken at once."""
        return bool(self.new or self._again)

    @property
    def urgent(self) -> bool:
        """True if there is one that a rank is about to use."""
        return bool(self._now)

    @property
    def new(self) -> bool:
        """True if there is one that was never taken."""
        return bool(self._now or self._later or self._guessed)

    def now(self, recipes: Iterable[Recipe]) -> None:
        """Ranks are about to use these, in this order."""
        for recipe in recipes:
            if self._is_new(recipe):
                self._later.pop(recipe.digest, None)
                self._guessed.pop(recipe.digest, None)
                self._now[recipe.digest] = recipe

    def later(self, recipes: Sequence[Recipe], node: int, nodes: int, cores: float) -> list[Recipe]:
        """Add a profile, as the agent of `node` of `nodes` does, each of which compiles on so many `cores`. Returns its order."""
        tried = [recipe for recipe in recipes if recipe.order >= TRIED]
        needed = [recipe for recipe in recipes if recipe.order < TRIED]
        ordered = [*_in_order(needed, node, nodes, cores), *_in_order(tried, node, nodes, cores)]
        for recipe in ordered:
            self._targets.add(recipe.target)
            if self._is_new(recipe):
                self._guessed.pop(recipe.digest, None)
                self._later[recipe.digest] = recipe
                self._recorded.append(recipe)
        return ordered

    def retarget(self, target: str) -> None:
        """No profile covers this GPU: queue the recipes of its vendor first, retargeted."""
        if not target or target in self._targets or not self._recorded:
            return
        self._targets.add(target)
        kind = target.partition(":")[0]
        others = [
            replace(recipe, target=target) for recipe in self._recorded if recipe.target.partition(":")[0] == kind
        ]
        self._later = {other.digest: other for other in others if self._is_new(other)} | self._later

    def guess(self, recipes: Iterable[Recipe]) -> int:
        """The job may use these; returns how many are new."""
        before = len(self._guessed)
        for recipe in recipes:
            if self._is_new(recipe) and recipe.digest not in self._later:
                self._guessed[recipe.digest] = recipe
        return len(self._guessed) - before

    def drop_guesses(self) -> None:
        self._guessed.clear()

    def take(self) -> Recipe | None:
        for queue in (self._now, self._later, self._guessed, self._again):
            for digest, recipe in queue.items():
                del queue[digest]
                self._tries[digest] = self._tries.get(digest, 0) + 1
                return recipe
        return None

    def busy(self, recipe: Recipe) -> None:
        """Another process, here or on another node, compiles what was taken: its artifact is fetched after `again`, last."""
        tries = self._tries.get(recipe.digest, 1)
        if tries < _MOST_TRIES:
            self._busy[recipe.digest] = recipe, self._round + min(2 ** (tries - 1), _LONGEST_PAUSE)

    def again(self) -> None:
        """Call it about once a second."""
        self._round += 1
        due = [digest for digest, (_, at) in self._busy.items() if at <= self._round]
        self._again |= {digest: self._busy.pop(digest)[0] for digest in due}

    def asked(self, digest: str) -> bool:
        """A rank asks for the key of this recipe by itself, and compiles it unless somebody does. True if it was in a queue."""
        for queue in (self._now, self._later, self._guessed):
            if queue.pop(digest, None) is not None:
                self._tries[digest] = 1
                return True
        return False

    def _is_new(self, recipe: Recipe) -> bool:
        known = recipe.digest in self._tries or recipe.digest in self._now
        return not known and len(self) + len(self._tries) < _MOST


def _in_order(recipes: Sequence[Recipe], node: int, nodes: int, cores: float) -> list[Recipe]:
    longest_first = sorted(recipes, key=lambda r: (-r.seconds, r.order, r.digest))
    shares = dealt(longest_first, max(1, min(nodes, len(longest_first))))
    own = node % len(shares)
    found: list[Recipe] = []
    for share in shares[own:] + shares[:own]:
        long = sum(recipe.seconds for recipe in share) / max(1.0, cores)
        found += sorted(share, key=lambda r: (-r.seconds if r.seconds >= long else 0.0, r.order, r.digest))
    return found


def dealt(tasks: Sequence[T], world: int) -> list[list[T]]:
    """Deal `tasks`, longest first, into shares for `world` nodes, so that all end at about the same time.

    Each task goes to the node with the least work so far (Graham's longest processing time first: at most a third above the best
    schedule). A task of unknown seconds counts as the average of the others. An optimization only: nodes whose lists differ share
    the work less well, and compile nothing twice.
    """
    known = [task.seconds for task in tasks if task.seconds > 0]
    usual = sum(known) / len(known) if known else 1.0
    shares: list[list[T]] = [[] for _ in range(world)]
    loads = [(0.0, node) for node in range(world)]
    for task in tasks:
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + (task.seconds or usual), owner))
        shares[owner].append(task)
    return shares
