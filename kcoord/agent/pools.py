"""The agent's side of the node's pools, one for each job: what is upcoming, who starts the pool, and how much it may do.

A pool's worker asks for its next recipe, and waits for the answer until there is one and a core idles. A caller of
`kcoord.warmup` takes recipes of its list from the same queue, without a wait; meanwhile workers need no idle core.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from kcoord.agent.chores.profiles import Profiles
from kcoord.agent.connections import Connection, Connections
from kcoord.agent.guesses import Guesses
from kcoord.agent.upcoming import Upcoming
from kcoord.errors import KcoordError, ProtocolError
from kcoord.keys.cache_key import CacheKey
from kcoord.packs.recipe import MOST_AT_ONCE, Recipe
from kcoord.protocol.messages import Announce, Answer, Done, Granted, Join, Joined, Next, Take, Work
from kcoord.settings import profile_name
from kcoord.telemetry.events import Notices, tell_if_failed
from kcoord.telemetry.spans import KEY_DIGITS

_MOST_POOLS = 64
_MOST_STARTS = 3  # attempts for one job's pool: its imports may crash it
_STARTS_WITHIN = 30.0  # seconds; then another process may start it
_PROFILE_WITHIN = 5.0  # seconds; a store that takes longer tells at the next miss what is upcoming
_MOST_MODULES = 256
_ASKS_AGAIN = 20.0  # seconds; a worker waits so long for one answer
_LOOKS_AGAIN = 1.0  # seconds; one that was refused for want of cores looks at them again
_RESTS = 30.0  # seconds; a pool that had nothing to do for so long ends, and gives its memory back
_FORGOTTEN = 30.0  # seconds after which a job's queue is forgotten that has no process left
_FAILURES_SHOWN = 5
_MEMORY = 1 << 30  # bytes that must be free for one worker more: a compiler; the rest is shared with the others
_GUESSES_PAY = 32  # compiles; if ranks have used none of so many, the rest of the guesses is dropped
_ENDS = ("compiled", "loaded", "failed")
_OVER = Joined(0, [])


@dataclass
class _Idle:
    """A worker that waits for the answer to its `request`."""

    connection: Connection
    request: int
    take: Take
    since: float


@dataclass
class _Caller:
    """A process that waits for a warm-up. `first`: in the queue's order, recipes to take unless somebody has; then those of
    `unsettled`, once each, to wait for. `at` is the one that it compiles."""

    workers: int = 0  # that the pool may have for it
    first: deque[Recipe] = field(default_factory=deque)
    unsettled: dict[str, Recipe] = field(default_factory=dict)  # by digest
    rest: deque[str] | None = None  # digests that it has not waited for
    at: Recipe | None = None
    pooled: int = 0  # keys of its list that workers of the pool compiled


@dataclass
class _Pool:
    guesses: Guesses
    callers: dict[int, _Caller] = field(default_factory=dict)  # by connection
    known: dict[str, Recipe] = field(default_factory=dict)  # by digest: those of all callers, each kept once
    upcoming: Upcoming = field(default_factory=Upcoming)
    profiles: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    is_unknown: bool = False  # there is no profile of the job
    modules: dict[str, None] = field(default_factory=dict)
    process: int = 0  # the connection of the process that forks the workers; 0: there is none
    joins: tuple[Connection, int] | None = None  # the process waits for the answer to this request
    starts: int = 0
    start_granted: float = -math.inf
    workers: dict[int, int] = field(default_factory=dict)  # connection → process id
    idle: dict[int, _Idle] = field(default_factory=dict)  # by connection
    busy: dict[int, Recipe] = field(default_factory=dict)  # by connection
    served: int = 0  # grows with each recipe that any pool is given
    active: float = 0.0  # when it last had something to do
    ended: Counter[str] = field(default_factory=Counter)
    failures: deque[str] = field(default_factory=lambda: deque(maxlen=_FAILURES_SHOWN))
    guessed: int = 0  # recipes
    missed: int = 0  # keys that ranks asked for
    published: dict[str, Recipe] = field(default_factory=dict)  # by key: what was compiled, and no rank has used yet
    used: int = 0  # keys
    made: set[str] = field(default_factory=set)  # recipes whose keys its workers have compiled


class Permits:
    """Permits to compile ahead: for so many workers as there are idle cores and free memory, where the workers run. A permit
    belongs to a worker's connection, and ends with it.
    """

    def __init__(self) -> None:
        self._holders: set[int] = set()
        self._new: set[int] = set()  # holders whose memory is not missing yet in what is free

    def ask(self, owner: int, most: int, memory: int, idle: float, left: float) -> bool:
        """True if `owner` may compile one more key now, as one of at most `most`. A refusal ends the permit that it had.

        `memory`: bytes that are free where it runs. `idle` and `left`: cores there (`kcoord.cgroups.IdleCores`).
        """
        others, new = len(self._holders - {owner}), len(self._new - {owner})
        room = min(idle, left + len(self._holders))  # the quota counts what the holders use
        if others < most and others + 0.5 < room and memory >= _MEMORY * (1 + new):
            if owner not in self._holders:
                self._new.add(owner)
            self._holders.add(owner)
            return True
        self.gone(owner)
        return False

    def gone(self, owner: int) -> None:
        self._holders.discard(owner)
        self._new.discard(owner)

    def look(self) -> None:
        """Call it about once a second."""
        self._new.clear()


class Pools:
    """`most` workers at a time, of all pools, unless a warm-up asks for more.

    ``learn(recipes)`` takes what else a profile recorded.
    """

    def __init__(
        self,
        most: int,
        connections: Connections,
        profiles: Profiles,
        learn: Callable[[Collection[Recipe]], object],
        notices: Notices,
    ) -> None:
        self._most, self._connections, self._profiles, self._notices = most, connections, profiles, notices
        self._learn = learn
        self._permits = Permits()
        self._pools: dict[str, _Pool] = {}
        self._given = 0  # recipes

    # The queue, and the start of the pool.

    async def announce(self, connection: Connection, _: int, message: Announce) -> Granted:
        """Add to what the job's pool compiles. Raises `ProtocolError` for what is no recipe, or no name."""
        try:
            recipes = [Recipe.from_wire(recipe) for recipe in message.recipes[:MOST_AT_ONCE]]
            profile = None if message.profile is None else profile_name(message.profile)
        except ValueError as error:
            raise ProtocolError(f"this cannot be compiled ahead: {error}") from error
        pool = self._pool(connection.who.job, waited_for=message.waits)
        if pool is None:
            return Granted(granted=False)
        modules: list[str] = []
        if message.waits:
            self._connections.must_live(connection)
            caller = pool.callers.setdefault(connection.id, _Caller(message.workers))
            recipes = [pool.known.setdefault(recipe.digest, recipe) for recipe in recipes]
            caller.first += pool.upcoming.later(recipes, message.node, message.nodes, message.cores)
            caller.unsettled |= {recipe.digest: recipe for recipe in recipes}
        else:
            pool.upcoming.now(recipes)
        pool.modules |= dict.fromkeys(recipe.module for recipe in recipes)
        if profile is not None:
            await self._bring(pool, profile, message)
            pool.upcoming.retarget(message.target)
            if pool.is_unknown:
                if message.modules:
                    guesses = await pool.guesses.of(set(map(str, message.modules)), message.target)
                    pool.guessed += pool.upcoming.guess(guesses)
                    pool.modules |= dict.fromkeys(recipe.module for recipe in guesses)
                else:
                    modules = await pool.guesses.modules()
        self._dispatch()
        return Granted(not message.waits and self._may_start(pool), modules)  # a caller asks again at its first miss

    def join(self, connection: Connection, request: int, message: Join) -> Joined | None:
        """A pool's process is there: `Connections.answer` tells it what to import, as soon as there is something to compile."""
        pool = self._pool(connection.who.job)
        if pool is None or pool.process:
            return _OVER
        self._connections.must_live(connection)
        pool.process, pool.starts, pool.joins = connection.id, pool.starts + 1, (connection, request)
        pool.active = time.monotonic()
        self._dispatch()
        return None

    def asked(self, connection: Connection, recipe: str | None) -> None:
        """A process of a job claims the key of `recipe`."""
        pool = self._pools.get(connection.who.job)
        if pool is None:
            return
        pool.missed += not connection.who.pool
        if recipe is not None:
            pool.upcoming.asked(recipe)

    def _pool(self, job: str, waited_for: bool = False) -> _Pool | None:
        """The job's pool. None: there is to be none."""
        if job not in self._pools and (self._most or waited_for) and len(self._pools) < _MOST_POOLS:
            self._pools[job] = _Pool(Guesses(self._profiles.latest), active=time.monotonic())
        return self._pools.get(job)

    def _workers(self, pool: _Pool) -> int:
        """The most workers that `pool` may have now."""
        return max([self._most, *(caller.workers for caller in pool.callers.values())])

    def _may_start(self, pool: _Pool) -> bool:
        """True once, for whoever asks first."""
        now = time.monotonic()
        under_way = bool(pool.process) or now < pool.start_granted + _STARTS_WITHIN
        if under_way or not self._workers(pool) or not pool.upcoming.new or pool.starts >= _MOST_STARTS:
            return False
        pool.start_granted = now
        return True

    async def _bring(self, pool: _Pool, profile: str, message: Announce) -> None:
        """Add the recipes of `profile`, once, as soon as they are there."""
        reading = pool.profiles.get(profile)
        if reading is None:
            reading = pool.profiles[profile] = asyncio.ensure_future(self._read(pool, profile, message))
            reading.add_done_callback(lambda task: self._read_ended(pool, profile, task))
        await asyncio.wait({reading}, timeout=_PROFILE_WITHIN)

    async def _read(self, pool: _Pool, profile: str, message: Announce) -> None:
        recipes = await self._profiles.recorded(profile)
        pool.is_unknown = not recipes
        self._learn(recipes)
        found = [recipe for recipe in recipes if recipe.target]  # the others are for the ranks' current device
        pool.upcoming.later(found, message.node, message.nodes, message.cores)
        pool.modules |= dict.fromkeys(recipe.module for recipe in sorted(found, key=lambda recipe: recipe.order))
        self._dispatch()

    def _read_ended(self, pool: _Pool, profile: str, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            del pool.profiles[profile]  # it is read again when somebody asks
        if isinstance(error, KcoordError):
            self._notices.tell(f"nothing is compiled ahead: {error}")
        else:
            tell_if_failed(task, "nothing is compiled ahead", self._notices.tell)

    # The callers of a warm-up.

    def next(self, connection: Connection, _: int, message: Next) -> Answer:
        """A caller is free: its next recipe."""
        pool = self._pools.get(connection.who.job)
        caller = pool.callers.get(connection.id) if pool is not None else None
        if pool is None or caller is None:
            return Done()  # an earlier agent's
        at, caller.at = caller.at, None
        if at is not None:
            if message.ended == "failed":
                caller.unsettled.pop(at.digest, None)  # others try for themselves
            else:
                # a caller that waited for the pool's compile may tell us before the worker does
                self._settled(pool, at, message.ended, by_pool=at.digest in pool.made)
        recipe, waits = None, False
        while recipe is None and caller.first:
            tried = caller.first.popleft()
            # of a script's own kernels only the pool can make sense
            recipe = tried if tried.module != "__main__" and pool.upcoming.asked(tried.digest) else None
        if recipe is None:
            caller.rest = deque(caller.unsettled) if caller.rest is None else caller.rest
            while recipe is None and caller.rest:
                recipe, waits = caller.unsettled.get(caller.rest.popleft()), True
        caller.at = recipe
        wire = None if recipe is None else recipe.to_wire()
        return Work(wire, waits=waits, left=len(caller.unsettled), pooled=caller.pooled)

    def _settled(self, pool: _Pool, recipe: Recipe, how: str, *, by_pool: bool = False) -> None:
        if how in ("compiled", "loaded"):
            for caller in pool.callers.values():
                if caller.unsettled.pop(recipe.digest, None) is not None:
                    caller.pooled += by_pool

    # The workers.

    def take(self, connection: Connection, request: int, message: Take) -> Work | None:
        """A worker is free: `Connections.answer` gives it its next recipe, now or later."""
        self._connections.must_live(connection)
        pool = self._pools.get(connection.who.job)
        if pool is None:  # a new agent, which does not know what there is to do
            return Work(over=True)
        self._ended(pool, connection.id, message.ended, message.why)
        self._permits.gone(connection.id)  # another pool's turn may have come
        if message.last:
            return Work(over=True)
        pool.workers[connection.id] = connection.who.pid
        pool.idle[connection.id] = _Idle(connection, request, message, time.monotonic())
        self._dispatch()
        return None

    def compiling(self, connection: Connection) -> Recipe | None:
        """The recipe at which this client is as a worker."""
        pool = self._pools.get(connection.who.job)
        if pool is None:
            return None
        return next((r for worker, r in pool.busy.items() if pool.workers.get(worker) == connection.who.pid), None)

    def published(self, connection: Connection, key: CacheKey, seconds: float) -> None:
        """`key` was compiled by this client, which may be a worker."""
        recipe = self.compiling(connection)
        if recipe is None:
            return
        pool = self._pools[connection.who.job]
        pool.made.add(recipe.digest)
        if recipe.backend == key.backend:  # else it is a by-product, such as Triton's launchers
            pool.published[key.digest[:KEY_DIGITS]] = recipe.measured(seconds, recipe.order)

    def used(self, job: str, digests: Iterable[str]) -> None:
        """Ranks of the job have loaded the keys that begin with `digests`: the job's profile gets what it lacked.

        A rank records what it asks the agent for, and not what it finds on its node.
        """
        pool = self._pools.get(job)
        if pool is not None and (found := pool.published.keys() & set(digests)):
            pool.used += len(found)
            recipes = [pool.published.pop(digest).to_wire() for digest in found]
            for profile in list(pool.profiles)[:1]:
                for first in range(0, len(recipes), MOST_AT_ONCE):
                    self._profiles.add(profile, recipes[first : first + MOST_AT_ONCE])

    def gone(self, connection: int) -> None:
        self._permits.gone(connection)
        for pool in self._pools.values():
            pool.callers.pop(connection, None)
            pool.idle.pop(connection, None)
            pool.workers.pop(connection, None)
            if connection == pool.process:
                pool.starts -= pool.joins is not None  # it has imported no modules of the job
                pool.process, pool.start_granted, pool.joins = 0, -math.inf, None
                self._send_away(pool)
            if connection in pool.busy:
                self._ended(pool, connection, "failed", f"{pool.busy[connection].qualname}: its worker ended")

    def tick(self) -> None:
        """Call it about once a second."""
        self._permits.look()
        now = time.monotonic()
        for job, pool in list(self._pools.items()):
            if pool.upcoming.new or pool.busy:
                pool.active = now
            elif now > pool.active + _RESTS:
                self._send_away(pool)
                pool.starts = 0
            if pool.guessed and not pool.used and min(pool.ended["compiled"], pool.missed) >= _GUESSES_PAY:
                pool.upcoming.drop_guesses()
            pool.upcoming.again()
            patience = _LOOKS_AGAIN if pool.upcoming.ready else _ASKS_AGAIN
            for owner, idle in list(pool.idle.items()):
                if now > idle.since + patience:
                    del pool.idle[owner]
                    self._connections.answer(idle.connection, idle.request, Work())
            if not pool.process and now > pool.active + _FORGOTTEN and not self._connections.has_job(job):
                del self._pools[job]
        self._dispatch()

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

    def _dispatch(self) -> None:
        """Give recipes to idle workers, as long as there are cores for them: first what ranks are about to use, then in turns."""
        for pool in sorted(self._pools.values(), key=lambda pool: (not pool.upcoming.urgent, pool.served)):
            if pool.joins and pool.upcoming.ready:
                # an import may have ended its predecessor
                modules = list(pool.modules)[:_MOST_MODULES] if pool.starts == 1 else []
                self._joined(pool, Joined(self._workers(pool), modules))
            for owner, idle in list(pool.idle.items()):
                take = idle.take
                # a warm-up asks for as many workers as it leaves cores
                here = (math.inf, math.inf) if pool.callers else (take.idle, take.left)
                if not pool.upcoming.ready or not self._permits.ask(owner, self._workers(pool), take.memory, *here):
                    break
                recipe = pool.upcoming.take()
                assert recipe is not None
                self._given += 1
                pool.served = self._given
                del pool.idle[owner]
                pool.busy[owner] = recipe
                self._connections.answer(idle.connection, idle.request, Work(recipe.to_wire()))

    def _joined(self, pool: _Pool, answer: Joined) -> None:
        if pool.joins is not None:
            (connection, request), pool.joins = pool.joins, None
            self._connections.answer(connection, request, answer)

    def _send_away(self, pool: _Pool) -> None:
        self._joined(pool, _OVER)
        for idle in pool.idle.values():
            self._connections.answer(idle.connection, idle.request, Work(over=True))
        pool.idle.clear()

    def _ended(self, pool: _Pool, owner: int, how: str, why: str) -> None:
        recipe = pool.busy.pop(owner, None)
        if recipe is None:
            return
        self._settled(pool, recipe, how, by_pool=how == "compiled")
        if how == "busy":
            pool.upcoming.busy(recipe)
        elif how in _ENDS:
            pool.ended[how] += 1
        if how == "failed":
            pool.failures.append(why[:200])
