"""Looks into the local tier: many of them in one thread's turn, and what each of them finds."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

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
        looks.look(digest, home, answers[-1].set_result)
    return await asyncio.wait_for(asyncio.gather(*answers), within)


def looking(wanted: list[tuple[str, str]]) -> tuple[list[bool], int, list[str]]:
    """Answers, turns of a thread, and notices."""
    notices = Notices()
    with Threads(4) as threads:
        answers = asyncio.run(found(LocalLooks(threads, None, notices, vouched=False), wanted))
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
    monkeypatch.setattr(local, "check_tier", lambda tier, local_dir: checked.append(tier))
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
        looks, wanted = LocalLooks(threads, None, notices, vouched=False), [(key_of("k").digest, home)]
        with monkeypatch.context() as patch:
            patch.setattr(local, "is_whole", ill)
            assert await found(looks, wanted) == [False]
        assert await found(looks, wanted) == [True]

    home, notices = published(tmp_path, "k"), Notices()
    with Threads(4) as threads:
        asyncio.run(scenario())
    assert any("please report it: ZeroDivisionError: look" in line for line in notices.since(0)[0])


def test_a_look_that_hangs_holds_up_no_other_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native, goes_on = local.is_whole, threading.Event()

    def hanging(home: Path, digest: str, *, vouched: bool) -> bool:
        assert home.name != "hangs" or goes_on.wait(20)
        return native(home, digest, vouched=vouched)

    async def scenario() -> None:
        looks, slow = LocalLooks(threads, None, Notices(), vouched=False), list[bool]()
        looks.look(key_of("hangs").digest, str(tmp_path / "hangs"), slow.append)
        await asyncio.sleep(0)  # its turn has come
        assert await found(looks, [(key_of("k").digest, home)]) == [True]
        assert not slow
        goes_on.set()

    monkeypatch.setattr(local, "is_whole", hanging)
    home = published(tmp_path, "k")
    with Threads(4) as threads:
        asyncio.run(scenario())


@pytest.mark.parametrize("closes", ["before", "during"])
def test_after_its_end_it_looks_no_more(tmp_path: Path, closes: str) -> None:
    async def scenario() -> None:
        looks = LocalLooks(threads, None, Notices(), vouched=False)
        told: list[bool] = []
        if closes == "before":
            looks.close()
        for _ in range(65):
            looks.look(key_of("k").digest, str(tmp_path / "k"), told.append)
        if closes == "during":
            await asyncio.sleep(0)
            looks.close()
        while looks._turns:
            await asyncio.sleep(0.005)
        assert len(told) == (0 if closes == "before" else 64)

    with Threads(4) as threads:
        asyncio.run(asyncio.wait_for(scenario(), 10))
