"""The agent's reading of profiles: once for all who ask at a job's start."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from kcoord.agent.chores import profiles
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
