"""Spans and recipes of one process, delivered to the agent in batches.

There is a delivery after each compile, since a compile worker may be killed without a warning; within a second after a load; and
at the end of the process. A handle from memory delivers nothing by itself, and no delivery starts an agent. A child that ends by
``os._exit`` is not counted for its last second.
"""

from __future__ import annotations

import math
import os
import platform
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from kcoord.errors import StoreError
from kcoord.files.daemon import Deferred
from kcoord.keys.cache_key import CacheKey
from kcoord.packs.recipe import MOST_AT_ONCE as MOST_RECIPES_AT_ONCE
from kcoord.packs.recipe import MOST_RECIPES, Recipe, add
from kcoord.packs.recipe_files import roots, save_part
from kcoord.protocol.identity import Identity
from kcoord.protocol.messages import Deliver, Done, Record
from kcoord.rank.client import AgentClient
from kcoord.rank.compilation import Compilation
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord.telemetry.figures import Figures, Sums
from kcoord.telemetry.span_files import write_own
from kcoord.telemetry.spans import KEY_DIGITS, MOST_AT_ONCE, SHORTEST_WAIT, Process, Span

_EVERY = 1.0  # seconds between two deliveries of a rank that only loads
_MOST_KEPT = 4096  # spans
_FRAME_BYTES = 1 << 20  # of recipes: a quarter of the largest frame; a recipe's own bound is far below
_MOST_INSIDE = 1000  # compiles of a thread that may be parts of one that still goes on


class Spans:
    """Thread-safe; after a fork the child needs its own.

    Keeps at most `_MOST_KEPT` and counts further ones as dropped. Recording a span costs some microseconds, a hit in memory less
    than one.
    """

    def __init__(self) -> None:
        # protects all below; reentrant, since a signal handler may add a span while its thread holds it
        self._lock = threading.RLock()
        self._kept: list[Span] = []
        self._hits: dict[str, int] = {}  # by backend, in memory
        self._dropped = 0
        self._figures = Figures()
        self._epoch = time.time() - time.perf_counter()  # read once: a clock that steps does not distort a row

    def add(
        self, kind: str, outcome: str, key: CacheKey, started: float, seconds: float,
        saved: float = 0.0, aside: bool = False, note: str = "", source: str = "", inside: float = 0.0,
    ) -> None:  # fmt: skip
        """Record a span that began at `started` by `time.perf_counter`."""
        begin, digest = self._epoch + started, key.digest[:KEY_DIGITS]
        span = Span(kind, outcome, key.backend, key.name, digest, begin, seconds, saved, aside, note, source, inside)
        with self._lock:
            self._keep(span)

    def stands_aside(self, compiler: str, part: str, why: str) -> None:
        """Record that this process has not hooked `part` of a compiler."""
        with self._lock:
            self._keep(Span("unhooked", "alone", compiler, part, "", time.time(), 0.0, note=why))

    def hit(self, backend: str) -> None:
        """Count a handle that was found in memory."""
        with self._lock:
            self._hits[backend] = self._hits.get(backend, 0) + 1

    def undelivered(self, most: int = _MOST_KEPT) -> tuple[list[list[Any]], int]:
        """The oldest spans, at most `most`, as `Span.to_wire` gives them, and the number of dropped ones."""
        with self._lock:
            self._gather()
            oldest, dropped = self._kept[:most], self._dropped
        return [span.to_wire() for span in oldest], dropped

    def batches(self) -> Iterator[tuple[list[list[Any]], int]]:
        """`undelivered` in batches of `MOST_AT_ONCE`, at least one. Mark each as `delivered` before the next."""
        for _ in range(_MOST_KEPT // MOST_AT_ONCE + 1):
            yield self.undelivered(MOST_AT_ONCE)
            if not self:
                return

    def delivered(self, count: int, dropped: int) -> None:
        """Forget the `count` oldest spans and `dropped` of the dropped ones: the agent has both."""
        with self._lock:
            del self._kept[:count]
            self._dropped -= dropped

    def read(self) -> Sums:
        """The figures of this process since it began."""
        with self._lock:
            self._gather()
            return self._figures.read()

    def __len__(self) -> int:
        return len(self._kept) + bool(self._dropped) + len(self._hits)

    def _gather(self) -> None:
        """Make spans of the hits in memory."""
        now = time.time()
        while self._hits:
            backend, count = self._hits.popitem()
            self._keep(Span("memory", "ok", backend, "", "", now, 0.0, count=count))

    def _keep(self, span: Span) -> None:
        self._figures.add(span)
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(span)
        else:
            self._dropped += 1


class _Thread(threading.local):
    """The latest compiles of a thread that lie in no other one so far: begin by `time.perf_counter`, and seconds."""

    def __init__(self) -> None:
        self.ended: deque[tuple[float, float]] = deque(maxlen=_MOST_INSIDE)


class RecipeQueue:
    """Recipes for the profile `recorded_as`. Thread-safe. Not guaranteed: that the last ones of a killed process arrive."""

    def __init__(self, settings: Settings, client: AgentClient, notices: Notices) -> None:
        self._settings, self._client, self._notices = settings, client, notices
        # protects the two below; reentrant, since a signal's handler may come while its thread is in here
        self._lock = threading.RLock()
        self._seen: dict[str, int] = {}  # digest → order
        self._waiting: dict[str, Recipe] = {}

    def put(self, recipe: Recipe) -> None:
        """Keep `recipe` for the next delivery, unless it was put before, with an earlier order. Costs microseconds."""
        digest = recipe.digest
        with self._lock:
            if recipe.order < self._seen.get(digest, math.inf) and len(self._seen) < MOST_RECIPES:
                self._seen[digest] = recipe.order
                add(self._waiting, recipe)

    def __len__(self) -> int:
        return len(self._waiting)

    def deliver(self) -> bool:
        """Deliver all recipes. False if no agent took them; none is started."""
        name = self._settings.recorded_as
        for batch in _batches(self._snapshot()) if name is not None else ():
            request = Record(str(name), [recipe.to_wire() for recipe in batch])
            if self._client.ask(request, Done, quietly=True, start=False) is None:
                return False
            self._delivered(batch)
        return True

    def keep(self) -> None:
        """Write the recipes as a part on this node, without an agent. Only agents write to the store, which may hang."""
        name, recipes = self._settings.recorded_as, self._snapshot()
        if name is None or not recipes:
            return
        try:
            here = self._settings.local_dir
            save_part(roots(None, here)[0] / name, recipes, local_dir=here)
        except StoreError as error:
            self._notices.tell(f"the profile {name} is not kept: {error}")
        else:
            self._delivered(recipes)

    def _snapshot(self) -> list[Recipe]:
        with self._lock:
            return list(self._waiting.values())

    def _delivered(self, recipes: list[Recipe]) -> None:
        with self._lock:
            for recipe in recipes:
                if self._waiting.get(recipe.digest) is recipe:
                    del self._waiting[recipe.digest]


def _batches(recipes: list[Recipe]) -> Iterator[list[Recipe]]:
    batch: list[Recipe] = []
    size = 0
    for recipe in recipes:
        if batch and (len(batch) == MOST_RECIPES_AT_ONCE or size + recipe.size > _FRAME_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(recipe)
        size += recipe.size
    if batch:
        yield batch


class RankTelemetry:
    """Records the outcome of each request, and delivers it. Thread-safe and fork-safe.

    Nothing is recorded while ``usable()`` is False: kcoord is off then. Not guaranteed: that spans arrive, or arrive once. The
    last ones of a killed process are lost; those that an agent received and did not acknowledge are sent again.
    """

    def __init__(self, settings: Settings, client: AgentClient, notices: Notices, usable: Callable[[], bool]) -> None:
        self._settings, self._client, self._notices, self._usable = settings, client, notices, usable
        self.forget_after_fork()

    def forget_after_fork(self) -> None:
        """Start from zero: the parent delivers its own spans."""
        self.spans, self._thread = Spans(), _Thread()
        self.recipes = RecipeQueue(self._settings, self._client, self._notices)
        self._delivering = threading.Lock()  # protects a span from being delivered twice
        self._later = Deferred(_EVERY, self.deliver)

    def loaded(self, key: CacheKey, saved: float, source: str, aside: bool, begun: float) -> None:
        """A request that began to load at `begun` ended with an artifact from `source` (`SOURCES`). `saved`: compile seconds."""
        self.spans.add("load", "ok", key, begun, time.perf_counter() - begun, saved, aside, source=source)
        self._later.begin()

    def stands_aside(self, compiler: str, part: str, why: str) -> None:
        """This process has not hooked `part` of a compiler."""
        self.spans.stands_aside(compiler, part, why)
        self._later.begin()

    def found_in_memory(self, backend: str) -> None:
        """A request ended with a handle in memory."""
        self.spans.hit(backend)

    def waited(self, outcome: str, key: CacheKey, aside: bool, begun: float, took: float, note: str = "") -> None:
        """The agent answered after `took` seconds: ``ok`` and ``fetch`` with an artifact, else with what the rank is to do."""
        kind, ended = ("fetch", "ok") if outcome == "fetch" else ("wait", outcome)
        if ended == "ok" or took >= SHORTEST_WAIT or ended == "failed":
            self.spans.add(kind, ended, key, begun, took, aside=aside, note=note)

    def ended(self, compilation: Compilation, took: float) -> None:
        """Record a compile of `took` seconds, and deliver it at once."""
        if self._usable():
            outcome = compilation.outcome
            coordinated = compilation.lead is not None or compilation.failed is not None
            if outcome in ("ok", "private") and compilation.shared and not coordinated:
                outcome = "alone"
            begun = compilation.started
            self.spans.add(
                "compile", outcome, compilation.key, begun, took, aside=compilation.aside, note=compilation.note,
                inside=self._inside(begun, took),
            )  # fmt: skip
        self.deliver()

    def _inside(self, begun: float, took: float) -> float:
        """The seconds of the compiles that this thread made since `begun`, as parts of the one that has ended now."""
        ended, inside = self._thread.ended, 0.0
        while ended and ended[-1][0] >= begun:
            inside += ended.pop()[1]
        ended.append((begun, took))
        return inside

    def record(self, recipe: Recipe) -> None:
        """Keep `recipe` for the profile that this job records, if it records one. Costs microseconds."""
        if self._settings.recorded_as is not None and self._usable():
            self.recipes.put(recipe)

    def deliver(self) -> bool:
        """Deliver the spans, and the recipes. False if no agent took them."""
        if not (self.spans or self.recipes) or not self._usable():
            return True
        if not self._delivering.acquire(blocking=False):
            return True  # another thread delivers; the next delivery has the rest
        try:
            for spans, dropped in self.spans.batches() if self.spans else ():
                if self._client.ask(Deliver(spans, dropped), Done, quietly=True, start=False) is None:
                    return False
                self.spans.delivered(len(spans), dropped)
            return self.recipes.deliver()
        finally:
            self._delivering.release()

    def close(self) -> None:
        """Deliver everything, or keep it on this node."""
        self._later.end(self._settings.agent_timeout)
        if not self.deliver():
            self._keep()
            self.recipes.keep()

    def _keep(self) -> None:
        """Write the spans to the agent's directory: a warm process needed no agent, and starts none for these."""
        name = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        process = Identity.here(self._settings)
        spans, dropped = self.spans.undelivered()
        if not spans and not dropped:
            return
        try:
            write_own(self._settings.local_dir, process.job, name, Process.here(process.rank), spans, dropped)
        except (OSError, StoreError) as error:
            self._notices.tell(f"figures and time line are not kept: {error}")
        else:
            self.spans.delivered(len(spans), dropped)
