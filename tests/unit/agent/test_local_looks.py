"""Looks into the local tier: many of them in one thread's turn, and what each of them finds."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kcoord.agent import local_looks
from kcoord.agent.local_looks import LocalLooks
from kcoord.artifacts import local
from kcoord.artifacts.manifest import Origin
from kcoord.telemetry.events import Notices
from tests.support.agents import key_of, stage


def published(root: Path, name: str) -> str:
    """The home of a whole artifact."""
    home = root / name
    local.publish_local(stage(home), home, key_of(name), 0.5, Origin.here(1, 0, ""))
    return str(home)


class Threads(ThreadPoolExecutor):
    """Counts its turns."""

    turns = 0

    def submit(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
        self.turns += 1
        return super().submit(*args, **kwargs)  # type: ignore[arg-type]


async def found(looks: LocalLooks, wanted: list[tuple[str, str]], within: float = 10.0) -> list[bool]:
    """The answers to looks that were wanted in one turn of the event loop."""
    answers: list[asyncio.Future[bool]] = []
    for digest, home in wanted:
        answers.append(asyncio.get_running_loop().create_future())
        looks.look(digest, home, lambda place, answer=answers[-1]: answer.set_result(bool(place)))  # type: ignore[misc]
    return await asyncio.wait_for(asyncio.gather(*answers), within)


def looking(wanted: list[tuple[str, str]]) -> tuple[list[bool], int, list[str]]:
    """Answers, turns of a thread, and notices."""
    notices = Notices()
    with Threads(4) as threads:
        answers = asyncio.run(found(LocalLooks(threads, notices, only_landed=False), wanted))
        return answers, threads.turns, notices.since(0)[0]


def test_looks_of_one_turn_of_the_loop_share_a_thread_s_turn(tmp_path: Path) -> None:
    homes = [published(tmp_path, f"k{n}") for n in range(3)]
    wanted = [(key_of(f"k{n}").digest, home) for n, home in enumerate(homes)]
    wanted.append((key_of("absent").digest, str(tmp_path / "absent")))
    assert looking(wanted) == ([True, True, True, False], 1, [])


def test_more_looks_than_one_turn_takes_are_all_answered(tmp_path: Path) -> None:
    home = published(tmp_path, "k")
    answers, turns, _ = looking([(key_of("k").digest, home)] * 200)
    assert answers == [True] * 200
    assert 1 < turns < 10


def test_what_does_not_verify_is_not_here(tmp_path: Path) -> None:
    torn, another = published(tmp_path, "torn"), published(tmp_path, "another")
    (Path(torn) / "kernel.txt").write_text("a kerneL")
    answers, _, notices = looking([(key_of("torn").digest, torn), (key_of("k").digest, another)])
    assert (answers, notices) == ([False, False], [])


def test_a_tier_where_others_may_write_is_told_of_and_harms_no_other_look(tmp_path: Path) -> None:
    ours, theirs = published(tmp_path / "ours", "k"), [published(tmp_path / "theirs", name) for name in ("k", "l")]
    (tmp_path / "theirs").chmod(0o777)
    wanted = [(key_of("k").digest, theirs[0]), (key_of("k").digest, ours), (key_of("l").digest, theirs[1])]
    answers, _, notices = looking(wanted)
    assert answers == [False, True, False]
    assert [line for line in notices if str(tmp_path / "theirs") in line]


def test_a_tier_is_checked_once_in_a_turn_and_again_in_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[Path] = []
    monkeypatch.setattr(local, "check_tier", lambda tier: checked.append(tier))
    wanted = [(key_of(name).digest, published(tmp_path, name)) for name in ("k", "l", "m")]
    for turn in (1, 2):
        assert looking(wanted)[0] == [True] * 3
        assert checked == [tmp_path] * turn


def test_after_an_error_that_nobody_foresaw_nothing_is_here_and_the_next_look_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ill(*_: object, **__: object) -> bool:
        raise ZeroDivisionError("look")

    async def scenario() -> None:
        looks, wanted = LocalLooks(threads, notices, only_landed=False), [(key_of("k").digest, home)]
        with monkeypatch.context() as patch:
            patch.setattr(local, "is_whole", ill)
            assert await found(looks, wanted) == [False]
        assert await found(looks, wanted) == [True]

    home, notices = published(tmp_path, "k"), Notices()
    with Threads(4) as threads:
        asyncio.run(scenario())
    assert any("please report it: ZeroDivisionError: look" in line for line in notices.since(0)[0])


class Hanging:
    """`local.is_whole`, which hangs for homes named ``hangs`` until it `goes_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.native, self.goes_on = local.is_whole, threading.Event()
        monkeypatch.setattr(local, "is_whole", self)

    def __call__(self, home: Path, digest: str) -> bool:
        assert home.name != "hangs" or self.goes_on.wait(20)
        return self.native(home, digest)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Hanging:
    return Hanging(monkeypatch)


def test_a_look_that_hangs_holds_up_no_other_turn(tmp_path: Path, hanging: Hanging) -> None:
    async def scenario() -> None:
        looks, slow = LocalLooks(threads, Notices(), only_landed=False), list[bool]()
        for _ in range(100):  # two turns
            looks.look(key_of("hangs").digest, str(tmp_path / "hangs"), lambda place: slow.append(bool(place)))
        await asyncio.sleep(0)
        assert await found(looks, [(key_of("k").digest, home)]) == [True]
        assert not slow
        hanging.goes_on.set()
        while looks._turns:
            await asyncio.sleep(0.005)
        assert slow == [False] * 100

    home = published(tmp_path, "k")
    with Threads(4) as threads:
        asyncio.run(scenario())


def test_beside_a_look_that_hangs_the_claims_of_its_turn_go_on_to_the_lease_after_seconds(
    tmp_path: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_looks, "_PATIENCE", 0.1)
    home = published(tmp_path, "k")
    before, hung, after = (
        (key_of("k").digest, home),
        (key_of("h").digest, str(tmp_path / "hangs")),
        (key_of("k").digest, home),
    )

    async def scenario() -> None:
        looks = LocalLooks(threads, Notices(), only_landed=False)
        assert await found(looks, [before, hung, after]) == [True, False, False]
        assert looks._turns, "the thread is still there"
        hanging.goes_on.set()

    with Threads(4) as threads:
        asyncio.run(scenario())


def test_while_all_looks_hang_claims_go_on_to_the_lease_after_seconds_at_most(
    tmp_path: Path, hanging: Hanging, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_looks, "_PATIENCE", 0.1)
    hung, wanted = (key_of("h").digest, str(tmp_path / "hangs")), (key_of("k").digest, published(tmp_path, "k"))

    async def scenario() -> None:
        looks = LocalLooks(threads, Notices(), only_landed=False)
        before = [asyncio.ensure_future(found(looks, [hung] * 64)) for _ in range(local_looks._ABREAST)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await found(looks, [wanted]) == [False], "no thread is left"
        assert await asyncio.gather(*before) == [[False] * 64] * local_looks._ABREAST
        assert await found(looks, [wanted]) == [False]
        hanging.goes_on.set()
        while looks._turns:
            await asyncio.sleep(0.005)
        assert await found(looks, [wanted]) == [True]

    with Threads(4) as threads:
        asyncio.run(scenario())


def test_a_user_who_may_have_no_more_threads_has_claims_that_go_on_to_the_lease(tmp_path: Path) -> None:
    class Refused(Threads):
        refuses = 4

        def submit(self, *args: object, **kwargs: object) -> object:  # type: ignore[override]
            self.refuses -= 1
            if self.refuses >= 0:
                raise RuntimeError("can't start new thread")
            return super().submit(*args, **kwargs)

    async def scenario() -> None:
        looks, wanted = (
            LocalLooks(threads, notices, only_landed=False),
            [(key_of("k").digest, published(tmp_path, "k"))],
        )
        for _ in range(4):
            assert await found(looks, wanted) == [False]
        assert await found(looks, wanted) == [True]

    notices = Notices()
    with Refused(4) as threads:
        asyncio.run(scenario())
    assert any("can't start new thread" in line for line in notices.since(0)[0])


def test_a_claim_whose_answer_fails_takes_no_other_with_it(tmp_path: Path) -> None:
    def ill(found: bool) -> None:
        raise ZeroDivisionError("answer")

    async def scenario() -> None:
        looks, wanted = (
            LocalLooks(threads, notices, only_landed=False),
            (key_of("k").digest, published(tmp_path, "k")),
        )
        for _ in range(4):
            looks.look(*wanted, ill)
            assert await found(looks, [wanted, wanted]) == [True, True]

    notices = Notices()
    with Threads(4) as threads:
        asyncio.run(scenario())
    assert any("please report it: ZeroDivisionError: answer" in line for line in notices.since(0)[0])


@pytest.mark.parametrize("closes", ["before its thread begins", "while its thread looks"])
def test_after_its_end_nothing_is_answered_and_nothing_begun(tmp_path: Path, hanging: Hanging, closes: str) -> None:
    async def scenario() -> None:
        looks, told = LocalLooks(threads, Notices(), only_landed=False), list[bool]()
        for _ in range(100):
            looks.look(key_of("k").digest, str(tmp_path / "hangs"), told.append)
        if closes == "while its thread looks":
            while not threads.turns:
                await asyncio.sleep(0)
        looks.close()
        hanging.goes_on.set()
        await asyncio.sleep(0)
        while looks._turns:
            await asyncio.sleep(0.005)
        assert not told
        assert threads.turns == (0 if closes == "before its thread begins" else 2)

    with Threads(4) as threads:
        asyncio.run(asyncio.wait_for(scenario(), 10))
