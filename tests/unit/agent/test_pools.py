"""The agent's side of pools: who starts one, what a worker gets, and what ends with whom."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from kcoord.agent import pools as pools_module
from kcoord.agent.pools import Pools
from kcoord.errors import ProtocolError, StoreError
from kcoord.packs.recipe import Recipe
from kcoord.protocol.identity import Identity
from kcoord.protocol.messages import Announce, Done, Granted, Join, Joined, Next, Take, Work
from kcoord.telemetry.events import Notices

MUCH = 64 << 30


def recipe(name: str, module: str = "kernels") -> Recipe:
    return Recipe("triton", module, name, {}, "cuda:90", 1.0, 0)


class Client:
    number = 0

    def __init__(self, job: str = "job") -> None:
        Client.number += 1
        self.id, self.who = Client.number, Identity(Client.number, None, None, job)


class Connections:
    def __init__(self) -> None:
        self.answers: list[tuple[Any, Any]] = []
        self.jobs: set[str] = set()

    def answer(self, connection: Any, request: int, answer: Any) -> None:
        self.answers.append((connection, answer))

    def must_live(self, connection: Any) -> None:
        pass

    def has_job(self, job: str) -> bool:
        return job in self.jobs


class Profiles:
    """Of this job, by name; and of other jobs."""

    def __init__(self) -> None:
        self.own: dict[str, list[Recipe]] = {}
        self.others: list[list[Recipe]] = []
        self.reads: list[str] = []
        self.added: list[tuple[str, list[Any]]] = []
        self.fails = False

    async def recorded(self, name: str) -> list[Recipe]:
        self.reads.append(name)
        if self.fails:
            raise StoreError("it cannot be read")
        return self.own.get(name, [])

    def add(self, name: str, recipes: list[Any]) -> None:
        self.added.append((name, recipes))

    async def latest(self) -> list[list[Recipe]]:
        self.reads.append("others")
        return self.others


@pytest.fixture(autouse=True)
def _loop() -> Iterator[None]:
    World.loop = asyncio.new_event_loop()
    yield
    World.loop.close()


class World:
    loop: asyncio.AbstractEventLoop

    def __init__(self, most: int = 2) -> None:
        self.connections, self.profiles = Connections(), Profiles()
        self.learned: list[Recipe] = []
        self.pools = Pools(
            most, self.connections, self.profiles, self.learned.extend,  # type: ignore[arg-type]
            Notices(),
        )  # fmt: skip

    def announce(self, client: Client, *recipes: Recipe, **how: Any) -> Granted:
        message = Announce([each.to_wire() for each in recipes], **how)
        return self.run(self.pools.announce(client, 1, message))  # type: ignore[arg-type]

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def take(self, worker: Client, idle: float = 8.0, **how: Any) -> Work | None:
        """The answer, if there is one at once."""
        before = len(self.connections.answers)
        answer = self.pools.take(worker, 1, Take(MUCH, idle, 1e6, **how))  # type: ignore[arg-type]
        if answer is not None:
            return answer
        return next((work for whom, work in self.connections.answers[before:] if whom is worker), None)

    def next(self, caller: Client, ended: str = "") -> str:
        """What a warm-up's caller gets: a recipe's name, with a mark if it is to wait for others; or how many keys are left."""
        work = self.pools.next(caller, 1, Next(ended))  # type: ignore[arg-type]
        assert isinstance(work, Work)
        return work.recipe["qualname"] + "?" * work.waits if work.recipe is not None else str(work.left)

    def join(self, process: Client) -> Joined | None:
        """The answer, if there is one at once."""
        before = len(self.connections.answers)
        answer = self.pools.join(process, 1, Join())  # type: ignore[arg-type]
        if answer is not None:
            return answer
        return next((said for whom, said in self.connections.answers[before:] if whom is process), None)

    def taken(self, worker: Client, idle: float = 8.0, **how: Any) -> str | None:
        work = self.take(worker, idle, **how)
        return work.recipe["qualname"] if work is not None and work.recipe is not None else None

    def status(self, job: str = "job") -> dict[str, Any]:
        return self.pools.status()[job]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(pools_module.time, "monotonic", lambda: now[0])

    def passes(seconds: float) -> None:
        now[0] += seconds

    return passes


def test_one_process_of_a_job_starts_its_pool(clock: Callable[[float], None]) -> None:
    world = World()
    first, second, other = Client(), Client(), Client("another job")
    assert [world.announce(each, recipe("f")).granted for each in (first, second, other)] == [True, False, True]
    assert world.join(first) == Joined(2, ["kernels"])
    assert world.join(second) == Joined(0, []), "there is one"
    clock(60)
    assert not world.announce(second, recipe("g")).granted
    world.pools.gone(first.id)
    assert world.announce(second).granted, "it has ended, and something is left"
    clock(60)
    assert world.announce(first).granted, "whoever was to start it did not"


def test_a_pool_whose_process_dies_again_and_again_is_started_no_more() -> None:
    world = World()
    granted = []
    for _ in range(5):
        granted.append(world.announce(Client(), recipe("f")).granted)
        process = Client()
        joined = world.join(process)
        assert joined is not None
        assert joined.modules == (["kernels"] if len(granted) == 1 else []), "an import may have ended it"
        world.pools.gone(process.id)
    assert granted == [True, True, True, False, False]


def test_a_pool_that_has_joined_is_told_what_to_import_once_there_is_something_to_compile(
    clock: Callable[[float], None],
) -> None:
    world, process, late = World(), Client(), Client(job="another")
    assert world.join(process) is None
    world.profiles.others = [[recipe("g", "other")]]
    assert not world.announce(Client(), profile="mine").granted
    assert not world.announce(Client(), profile="mine", modules=["other"], target="cuda:90").granted, "it is there"
    assert world.connections.answers == [(process, Joined(2, ["other"]))]
    assert world.join(late) is None
    clock(40)
    world.pools.tick()
    assert world.connections.answers[-1] == (late, Joined(0, [])), "the job needs none"


def test_without_workers_there_is_no_pool() -> None:
    assert not World(most=0).announce(Client(), recipe("f")).granted


def test_what_is_no_recipe_is_refused() -> None:
    world = World()
    for message in (Announce([{"a": 1}]), Announce(profile="../x")):
        with pytest.raises(ProtocolError):
            world.run(world.pools.announce(Client(), 1, message))  # type: ignore[arg-type]


def test_a_profile_is_read_once_and_again_after_it_could_not_be_read() -> None:
    world = World()
    world.profiles.own["mine"], world.profiles.fails = [recipe("f")], True
    assert not world.announce(Client(), profile="mine").granted
    world.profiles.fails = False
    assert world.announce(Client(), profile="mine").granted
    world.announce(Client(), profile="mine")
    assert world.profiles.reads == ["mine", "mine"]
    assert world.learned == [recipe("f")], "what its compiles took"


def test_a_job_without_a_profile_is_asked_once_for_the_modules_that_it_has_imported() -> None:
    world = World()
    world.profiles.others = [[recipe("f"), recipe("g", "other")]]
    assert world.announce(Client(), profile="mine").modules == ["kernels", "other"]
    assert world.announce(Client(), profile="mine", modules=["kernels"], target="cuda:90").granted
    assert world.announce(Client(), profile="mine").modules == []
    assert world.profiles.reads == ["mine", "others"]
    assert world.status()["guessed"] == 1


def test_what_a_job_announces_is_compiled_in_its_first_run_too() -> None:
    world = World()
    world.profiles.others = [[recipe("g", "other")]]
    answer = world.announce(Client(), recipe("f"), profile="mine")
    assert (answer.granted, answer.modules) == (True, ["other"])


def test_guesses_that_do_not_pay_are_dropped_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools_module, "_GUESSES_PAY", 2)
    world, worker = World(), Client()
    world.profiles.others = [[recipe(name) for name in "abcd"]]
    world.announce(Client(), profile="mine", modules=["kernels"], target="cuda:90")
    assert [world.taken(worker, ended=ended) for ended in ("", "compiled")] == ["a", "b"]
    world.pools.tick()
    assert world.taken(worker, ended="compiled") == "c", "no rank can have used them yet: none has asked for a key"
    for is_pool in (True, False, False):
        world.pools.asked(SimpleNamespace(who=Identity(1, None, None, "job", pool=is_pool)), None)  # type: ignore[arg-type]
    world.take(worker, ended="compiled", last=True)
    world.pools.tick()
    world.announce(Client(), profile="mine", modules=["kernels"], target="cuda:90")
    assert world.taken(worker) is None


def test_where_the_gpu_is_not_known_yet_what_the_latest_job_had_is_guessed() -> None:
    world = World()
    world.profiles.others = [[replace(recipe("f"), target="cuda:80")], [recipe("g")]]
    world.announce(Client(), profile="mine", modules=["kernels"])
    assert world.taken(Client()) == "f"
    assert world.status()["guessed"] == 1


def test_a_pool_that_ended_before_there_was_work_is_no_start() -> None:
    """Its successor imports the modules."""
    world, early, process = World(), Client(), Client()
    assert world.join(early) is None
    world.pools.gone(early.id)
    assert world.announce(Client(), recipe("f")).granted
    assert world.join(process) == Joined(2, ["kernels"])


def test_what_the_pool_compiled_and_a_rank_used_is_counted() -> None:
    world, worker, rank = World(), Client(), Client()
    world.announce(rank, recipe("f"), profile="mine")
    world.take(worker)
    assert world.pools.compiling(worker) == recipe("f")  # type: ignore[arg-type]
    assert world.pools.compiling(rank) is None  # type: ignore[arg-type]
    for client, backend, digest in ((worker, "triton", "a"), (worker, "triton-module", "d"), (rank, "triton", "b")):
        world.pools.published(client, SimpleNamespace(backend=backend, digest=digest * 64), 2.5)  # type: ignore[arg-type]
    for _ in range(2):
        world.pools.used("job", ["a" * 16, "b" * 16, "c" * 16, "d" * 16])
    assert world.pools.status()["job"]["used"] == 1
    assert world.profiles.added == [("mine", [recipe("f").measured(2.5, 0).to_wire()])], "no rank has asked for it"


def test_a_worker_gets_nothing_while_no_core_idles_and_looks_again_soon(clock: Callable[[float], None]) -> None:
    world, worker = World(), Client()
    world.announce(Client(), recipe("f"))
    assert world.take(worker, idle=0.3) is None
    clock(1.1)
    world.pools.tick()
    assert world.connections.answers[-1] == (worker, Work())
    assert world.taken(worker, idle=1.0) == "f"


def test_a_job_with_much_to_compile_does_not_starve_another() -> None:
    world = World(most=1)
    world.announce(Client(), *map(recipe, "abc"))
    worker = Client()
    assert world.taken(worker) == "a"
    world.announce(Client("late"), recipe("z"))
    late = Client("late")
    assert world.taken(late) is None
    assert world.taken(worker, ended="compiled") is None
    assert world.connections.answers[-1][0] is late, "its turn has come"


def test_a_pool_that_rests_is_sent_away_and_forgotten_with_its_job(clock: Callable[[float], None]) -> None:
    world, process, worker = World(), Client(), Client()
    world.announce(process, recipe("f"), profile="mine")
    world.join(process)
    world.connections.jobs.add("job")
    world.take(worker)
    assert world.take(worker, ended="compiled") is None
    clock(31)
    world.pools.tick()
    assert world.connections.answers[-1] == (worker, Work(over=True))
    world.pools.gone(process.id)
    world.pools.tick()
    assert world.status()["compiled"] == 1
    world.connections.jobs.clear()
    world.pools.tick()
    assert world.pools.status() == {}
    assert world.announce(Client(), recipe("f")).granted, "a later job of this name begins anew"


def test_a_worker_that_ends_in_the_middle_is_a_failure_and_its_core_is_free() -> None:
    world, worker = World(most=1), Client()
    world.announce(Client(), recipe("f"), recipe("g"))
    world.take(worker)
    world.pools.gone(worker.id)
    assert world.status()["failures"] == ["f: its worker ended"]
    assert world.taken(Client()) == "g"


def test_a_worker_of_a_job_that_a_new_agent_does_not_know_ends() -> None:
    assert World().take(Client()) == Work(over=True)


def test_recipes_of_the_current_device_are_left_to_the_ranks() -> None:
    world = World()
    world.profiles.own["mine"] = [replace(recipe("f"), target=""), recipe("g")]
    world.announce(Client(), profile="mine")
    worker = Client()
    assert [world.taken(worker), world.taken(worker, ended="compiled")] == ["g", None]


# Callers of a warm-up.


def test_callers_and_workers_share_a_list_and_each_waits_for_what_others_are_at() -> None:
    world, one, two, worker = World(), Client(), Client(), Client()
    for caller in (one, two):
        assert not world.announce(caller, *map(recipe, "abcd"), waits=True).granted, "the pool starts at a miss"
    assert [world.next(one), world.next(two), world.taken(worker), world.next(one, "compiled")] == ["a", "b", "c", "d"]
    assert world.next(one, "compiled") == "b?"
    assert world.next(two, "loaded") == "c?"
    world.take(worker, ended="compiled")
    assert [world.next(one, "loaded"), world.next(two, "loaded")] == ["0", "0"]
    done = world.pools.next(one, 1, Next())  # type: ignore[arg-type]
    assert done == Work(None, left=0, pooled=1)


def test_what_fails_elsewhere_each_caller_tries_for_itself_once() -> None:
    world, one, two, worker = World(), Client(), Client(), Client()
    for caller in (one, two):
        world.announce(caller, recipe("a"), recipe("b"), waits=True)
    assert [world.next(one), world.taken(worker)] == ["a", "b"]
    world.take(worker, ended="failed", why="no GPU")
    assert [world.next(one, "failed"), world.next(one, "compiled")] == ["b?", "0"]
    assert [world.next(two), world.next(two, "failed")] == ["a?", "0"]


def test_what_is_still_compiled_elsewhere_after_a_wait_is_left() -> None:
    world, caller = World(), Client()
    world.announce(caller, recipe("a"), waits=True)
    assert [world.next(caller), world.next(caller, "busy"), world.next(caller, "busy")] == ["a", "a?", "1"]


def test_a_caller_that_ends_leaves_its_recipe_to_the_others() -> None:
    world, one, two = World(), Client(), Client()
    for caller in (one, two):
        world.announce(caller, recipe("a"), waits=True)
    assert world.next(one) == "a"
    world.pools.gone(one.id)
    assert world.next(two) == "a?"


def test_kernels_of_a_script_are_left_to_the_pool_at_first() -> None:
    world, caller, worker = World(), Client(), Client()
    world.announce(caller, recipe("a", "__main__"), replace(recipe("b"), order=1), waits=True)
    assert [world.next(caller), world.taken(worker), world.next(caller, "compiled")] == ["b", "a", "a?"]


def test_a_warm_up_has_workers_where_others_have_none() -> None:
    world, caller, process = World(most=0), Client(), Client()
    world.announce(caller, recipe("a"), waits=True, workers=3)
    assert world.announce(caller).granted
    assert world.join(process) == Joined(3, ["kernels"])
    assert world.taken(Client(), idle=0.0) == "a", "whatever the machine's other processes do"
    for each in (caller, process):
        world.pools.gone(each.id)
    assert not world.announce(Client(), recipe("b")).granted, "nobody waits"


def test_a_caller_that_this_agent_does_not_know_is_told_nothing() -> None:
    world = World()
    assert world.pools.next(Client(), 1, Next()) == Done()  # type: ignore[arg-type]
