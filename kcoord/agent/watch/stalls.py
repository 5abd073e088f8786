"""Compilers that hang. One that spins looks busy: a hedge, or its lease's limit, ends that one's lead."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from kcoord.agent.chores.chore import Chore, Lane
from kcoord.stalls import Stalls
from kcoord.telemetry.events import Notices

C = TypeVar("C", bound=Hashable)


class StallWatch(Generic[C]):
    """Looks at the processes of ``compiling()`` four times in `seconds`, and calls ``stalled(c)`` for each that stalls.

    `seconds` of 0: never.
    """

    def __init__(
        self,
        seconds: float,
        compiling: Callable[[], Mapping[C, str]],
        stalled: Callable[[C], None],
        notices: Notices,
    ) -> None:
        self._compiling, self._stalled = compiling, stalled
        self._stalls: Stalls[C] = Stalls(seconds)
        self._lane = Lane("stalls")
        self.chores = [Chore("stalls", self._lane, self._look, notices, every=seconds / 4)] if seconds else []

    async def _look(self) -> None:
        compiling, now = dict(self._compiling()), time.monotonic()
        for found in await self._lane.run(lambda: self._stalls.look(compiling, now)):
            self._stalled(found)
