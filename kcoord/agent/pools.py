"""The agent's side of the node's pools, one for each job: what is upcoming, who starts the pool, and how much it may do.

A pool's worker asks for its next recipe, and waits for the answer until there is one and a core idles.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kcoord.agent.chores.profiles import Profiles
from kcoord.agent.connections import Connection, Connections
from kcoord.agent.guesses import guessed, modules_of
from kcoord.agent.upcoming import Upcoming
from kcoord.agent.watch.idle_cores import Permits
from kcoord.cgroups import cores
from kcoord.errors import ProtocolError
from kcoord.profiles.recipe import MOST_AT_ONCE, Recipe
from kcoord.protocol.messages import Granted, Join, Joined, Take, Work
from kcoord.protocol.messages import Upcoming as Announced
from kcoord.settings import profile_name
from kcoord.telemetry.events import Notices, tell_if_failed
from kcoord.telemetry.spans import KEY_DIGITS

_MOST_POOLS = 64
_MOST_STARTS = 3  # of a job's pool, whose process may die of what it imports
_STARTS_WITHIN = 30.0  # seconds; then another process may start it
_PROFILE_WITHIN = 5.0  # seconds; a store that takes longer tells at the next wait what is upcoming
_MOST_MODULES = 256
_ASKS_AGAIN = 20.0  # seconds; a worker waits so long for one answer
_RESTS = 30.0  # seconds; a pool that had nothing to do for so long ends, and gives its memory back
_FAILURES_SHOWN = 5
_GUESSED_FROM = 20  # profiles
_GUESSES_PAY = 32  # compiles; if ranks have used none of so many, the rest of the guesses is dropped
_ENDS = ("compiled", "loaded", "failed")


@dataclass
class _Pool:
    upcoming: Upcoming = field(default_factory=Upcoming)
    profiles: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    modules: dict[str, None] = field(default_factory=dict)
    process: int = 0  # the connection of the process that forks the workers; 0: there is none
    starts: int = 0
    start_granted: float = -math.inf
    idle: dict[int, tuple[Connection, int, float, int]] = field(default_factory=dict)
    """Worker's connection → itself, its request, since when, and bytes of memory that are free where it runs."""
    busy: dict[int, Recipe] = field(default_factory=dict)
    ended: Counter[str] = field(default_factory=Counter)
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=_FAILURES_SHOWN))
    active: float = 0.0  # when it last had something to do
    is_unknown: bool = False  # there is no profile of the job
    others: list[list[Recipe]] | None = None  # profiles of other jobs, the latest first
    guessed: int = 0  # recipes
    workers: set[int] = field(default_factory=set)  # their process ids
    published: set[str] = field(default_factory=set)  # keys that the pool compiled, and that no rank has used yet
    used: int = 0  # keys


class Pools:
    """`most` workers at a time, of all pools. ``count(job, counters)`` adds to the job's statistics."""

    def __init__(
        self,
        most: int,
        connections: Connections,
        profiles: Profiles,
        count: Callable[[str, dict[str, float]], object],
        notices: Notices,
    ) -> None:
        self._most, self._connections, self._profiles, self._notices = most, connections, profiles, notices
        self._count = count
        self._permits = Permits(most)
        self._pools: dict[str, _Pool] = {}

    async def upcoming(self, connection: Connection, _: int, message: Announced) -> Granted:
        """Add to what the job's pool compiles. Raises `ProtocolError` for what is no recipe, or no name."""
        try:
            recipes = [Recipe.from_wire(recipe) for recipe in message.recipes[:MOST_AT_ONCE]]
            profile = None if message.profile is None else profile_name(message.profile)
        except ValueError as error:
            raise ProtocolError(f"this cannot be compiled ahead: {error}") from error
        job = connection.who.job
        if not self._most or (job not in self._pools and len(self._pools) >= _MOST_POOLS):
            return Granted(granted=False)
        pool = self._pools.setdefault(job, _Pool())
        pool.upcoming.now(recipes)
        pool.modules |= dict.fromkeys(recipe.module for recipe in recipes)
        if profile is not None and profile not in pool.profiles:
            reading = asyncio.ensure_future(self._read(pool, profile, message.node, message.nodes))
            reading.add_done_callback(
                lambda task: tell_if_failed(task, "nothing is compiled ahead", self._notices.tell)
            )
            pool.profiles[profile] = reading
        self._dispatch(pool)
        if unread := [each for each in pool.profiles.values() if not each.done()]:
            await asyncio.wait(unread, timeout=_PROFILE_WITHIN)
        if profile is not None and pool.is_unknown:
            if pool.others is None:
                pool.others = await self._profiles.latest(_GUESSED_FROM)
            if not message.modules:
                return Granted(granted=False, modules=modules_of(pool.others))
            pool.guessed += pool.upcoming.guess(guessed(pool.others, set(map(str, message.modules)), message.target))
            self._dispatch(pool)
        now = time.monotonic()
        if (
            pool.process
            or not pool.upcoming.new
            or pool.starts >= _MOST_STARTS
            or now < pool.start_granted + _STARTS_WITHIN
        ):
            return Granted(granted=False)
        pool.start_granted = now
        return Granted(granted=True)

    def join(self, connection: Connection, _: int, message: Join) -> Joined:
        pool = self._pools.get(connection.who.job)
        if pool is None or pool.process:
            return Joined(0, [])
        self._connections.must_live(connection)
        pool.process, pool.starts = connection.id, pool.starts + 1
        pool.active = time.monotonic()
        # an import may have ended its predecessor
        modules = list(pool.modules)[:_MOST_MODULES] if pool.starts == 1 else []
        return Joined(max(1, min(self._most, int(cores()))), modules)

    def take(self, connection: Connection, request: int, message: Take) -> Work | None:
        """A worker is free: `Connections.answer` gives it its next recipe, now or later."""
        self._connections.must_live(connection)
        pool = self._pools.get(connection.who.job)
        if pool is None:  # a new agent, which does not know what there is to do
            return Work(over=True)
        self._ended(pool, connection.id, message.ended, message.why)
        if message.last:
            return Work(over=True)
        pool.workers.add(connection.who.pid)
        pool.idle[connection.id] = connection, request, time.monotonic(), message.memory
        self._dispatch(pool)
        return None

    def published(self, connection: Connection, digest: str) -> None:
        """The key `digest` was compiled by this client, which may be a worker."""
        if self.has_worker(connection):
            self._count(connection.who.job, {"ahead": 1})
            self._pools[connection.who.job].published.add(digest[:KEY_DIGITS])

    def has_worker(self, connection: Connection) -> bool:
        """True if the client is a worker of its job's pool."""
        pool = self._pools.get(connection.who.job)
        return pool is not None and connection.who.pid in pool.workers

    def used(self, job: str, digests: Iterable[str]) -> None:
        """Ranks of the job have loaded the keys that begin with `digests`."""
        pool = self._pools.get(job)
        if pool is not None and (found := pool.published.intersection(digests)):
            pool.published -= found
            pool.used += len(found)
            self._count(job, {"ahead_used": len(found)})

    def asked(self, job: str, recipe: str | None) -> None:
        """A process of the job claims the key of `recipe`."""
        if recipe is not None and (pool := self._pools.get(job)) is not None:
            pool.upcoming.asked(recipe)

    def gone(self, connection: int) -> None:
        self._permits.gone(connection)
        for pool in self._pools.values():
            pool.idle.pop(connection, None)
            if connection == pool.process:
                pool.process, pool.start_granted = 0, -math.inf
                self._send_away(pool)
            if connection in pool.busy:
                self._ended(pool, connection, "failed", f"{pool.busy[connection].qualname}: its worker ended")

    def tick(self) -> None:
        """Look at the cores, and at what was busy. Call it about once a second."""
        self._permits.look()
        now = time.monotonic()
        for pool in self._pools.values():
            if pool.upcoming.new or pool.busy:
                pool.active = now
            elif now > pool.active + _RESTS:
                self._send_away(pool)
                pool.starts = 0
            if pool.guessed and not pool.used and pool.ended["compiled"] >= _GUESSES_PAY:
                pool.upcoming.drop_guesses()
            pool.upcoming.again()
            self._dispatch(pool)
            for owner, (connection, request, since, _) in list(pool.idle.items()):
                if now > since + _ASKS_AGAIN:
                    del pool.idle[owner]
                    self._connections.answer(connection, request, Work())

    def status(self) -> dict[str, dict[str, Any]]:
        """For people, by job: what each pool is at, and how its compiles ended."""
        return {
            job: {
                "running": bool(pool.process),
                "starts": pool.starts,
                "busy": sorted(f"{recipe.module}.{recipe.qualname}" for recipe in pool.busy.values()),
                "queued": len(pool.upcoming),
                "guessed": pool.guessed,
                "used": pool.used,
                **{how: pool.ended[how] for how in _ENDS},
                "failures": list(pool.failures),
            }
            for job, pool in self._pools.items()
        }

    async def _read(self, pool: _Pool, profile: str, node: int, nodes: int) -> None:
        recipes = await self._profiles.recorded(profile)
        pool.is_unknown = not recipes
        pool.upcoming.later(recipes, node, nodes, cores())
        by_order = sorted(recipes, key=lambda recipe: recipe.order)
        pool.modules |= dict.fromkeys(recipe.module for recipe in by_order if recipe.target)
        self._dispatch(pool)

    def _dispatch(self, pool: _Pool) -> None:
        """Give recipes to idle workers, as long as there are cores for them."""
        for owner, (connection, request, _, memory) in list(pool.idle.items()):
            if not pool.upcoming.ready or not self._permits.ask(owner, memory):
                self._permits.gone(owner)
                continue
            recipe = pool.upcoming.take()
            assert recipe is not None
            del pool.idle[owner]
            pool.busy[owner] = recipe
            self._connections.answer(connection, request, Work(recipe.to_wire()))

    def _send_away(self, pool: _Pool) -> None:
        for connection, request, _, _ in pool.idle.values():
            self._connections.answer(connection, request, Work(over=True))
        pool.idle.clear()

    def _ended(self, pool: _Pool, owner: int, how: str, why: str) -> None:
        recipe = pool.busy.pop(owner, None)
        if recipe is None:
            return
        if how == "busy":
            pool.upcoming.busy(recipe)
        elif how in _ENDS:
            pool.ended[how] += 1
        if how == "failed":
            pool.failures.append(why[:200])
