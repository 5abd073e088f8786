"""The agent's reading of profiles: once for all who ask at a job's start."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from kcoord.agent.chores import profiles
from kcoord.errors import StoreError
from kcoord.profiles.parts import save_part
from kcoord.telemetry.events import Notices
from tests.support.agents import recipe_of


@pytest.mark.parametrize(("serves", "second"), [(60.0, 1), (0.0, 0)], ids=["at once", "later"])
def test_who_asks_for_a_profile_soon_after_another_gets_what_was_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serves: float, second: int
) -> None:
    monkeypatch.setattr(profiles, "_SERVES", serves)
    save_part(tmp_path / "profiles" / "job", [recipe_of("k")])

    async def scenario() -> list[int]:
        under_test = profiles.Profiles(None, tmp_path, Notices())
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
