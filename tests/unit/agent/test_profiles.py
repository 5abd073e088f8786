"""The agent's reading of profiles: once for all who ask at a job's start."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from kcoord.agent.chores import profiles
from kcoord.artifacts.signing import OFF, Trust
from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.packs.recipe import Recipe, today
from kcoord.packs.recipe_files import parts, save_part
from kcoord.telemetry.events import Notices
from tests.support.agents import recipe_of
from tests.support.signing import OURS, THEIRS, opened, trust


@pytest.mark.parametrize(("serves", "second"), [(60.0, 1), (0.0, 0)], ids=["at once", "later"])
def test_who_asks_for_a_profile_soon_after_another_gets_what_was_read(
    tmp_path: Path, serves: float, second: int
) -> None:
    save_part(tmp_path / "profiles" / "job", [recipe_of("k")])

    async def scenario() -> list[int]:
        under_test = profiles.Profiles(None, tmp_path, Notices(), serves=serves)
        first = len(await under_test.recorded("job"))
        shutil.rmtree(tmp_path / "profiles")
        await asyncio.sleep(0)  # the loop's due timers run
        await asyncio.sleep(0.001)
        return [first, len(await under_test.recorded("job"))]

    assert asyncio.run(scenario()) == [1, second]


def test_a_job_that_begins_at_once_after_another_finds_what_that_one_recorded(tmp_path: Path) -> None:
    async def scenario() -> int:
        under_test = profiles.Profiles(None, tmp_path, Notices())
        assert await under_test.recorded("job") == []
        under_test.add("job", [recipe_of("k").to_wire()])
        (chore,) = under_test.chores
        chore.begin()
        await chore.settled()
        return len(await under_test.recorded("job"))

    assert asyncio.run(scenario()) == 1


def test_a_profile_that_could_not_be_read_is_read_when_somebody_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_part(tmp_path / "profiles" / "job", [recipe_of("k")])

    async def scenario() -> int:
        under_test = profiles.Profiles(None, tmp_path, Notices())
        with monkeypatch.context() as patch:
            patch.setattr(under_test, "_read", refused)
            with pytest.raises(StoreError):
                await under_test.recorded("job")
        return len(await under_test.recorded("job"))

    def refused(name: str) -> None:
        raise StoreError(name)

    assert asyncio.run(scenario()) == 1


def of_day(name: str, ago: int) -> Recipe:
    return replace(recipe_of(name), day=today() - ago)


def recorded(store: Store, *names: str) -> set[str]:
    """The kernels in the part of an agent whose ranks use the kernels `names`."""
    directory = store.root / "v2" / "profiles" / "job"
    others = set(directory.glob("*"))

    async def scenario() -> None:
        agent = profiles.Profiles(store.root, store.root.parent / "local", Notices(), store.trust)
        await agent.recorded("job")
        agent.add("job", [of_day(name, 0).to_wire() for name in names])
        (chore,) = agent.chores
        chore.begin()
        await chore.settled()

    asyncio.run(scenario())
    for path in others:
        path.unlink()  # its part alone tells
    strict = Trust("require", store.trust.keys) if store.trust.keys else OFF
    return {recipe.call for recipe in parts(directory, Notices(), strict)}


def test_an_agents_part_holds_what_others_recorded_and_no_job_has_passed_over_for_long(tmp_path: Path) -> None:
    store = opened(tmp_path / "store")
    directory = store.root / "v2" / "profiles" / "job"
    save_part(directory, [of_day("of another stage", 3), of_day("edited since", 11)])
    save_part(directory, [of_day("of another rank", 9), recipe_of("of unknown days")])
    assert recorded(store, "ours") == {"of another stage", "of another rank", "ours"}
    assert {recipe.day for recipe in parts(directory, Notices())} == {today() - 9, today() - 3, today()}


@pytest.mark.parametrize("policy", ["off", "require"])
def test_an_agent_signs_nothing_for_others_that_nobody_has_vouched_for(tmp_path: Path, policy: str) -> None:
    store = opened(tmp_path / "store", OURS, policy=policy)
    directory = store.root / "v2" / "profiles" / "job"
    for name, keys in (("signed", (OURS,)), ("by strangers", (THEIRS,)), ("not signed", ())):
        save_part(directory, [of_day(name, 0)], trust=trust(*keys) if keys else OFF)
    assert recorded(store, "ours") == {"signed", "ours"}
