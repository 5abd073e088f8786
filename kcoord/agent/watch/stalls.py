"""Compilers that hang, and those that work. One that spins looks busy: a hedge, or its lease's limit, ends that one's lead."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from kcoord.agent.chores.chore import Chore, DiskThread
from kcoord.stalls import Stalls
from kcoord.telemetry.events import Notices

C = TypeVar("C", bound=Hashable)


class StallWatch(Generic[C]):
    """Looks at the processes of ``compiling()`` each `every` seconds. Calls ``stalled(c)`` for each that stalls for `seconds`,
    and ``works(c)`` for each that has used the CPU since the look before.

    `seconds` of 0: never.
    """

    def __init__(
        self,
        seconds: float,
        compiling: Callable[[], Mapping[C, str]],
        stalled: Callable[[C], None],
        notices: Notices,
        *,
        works: Callable[[C], None],
        every: float,
    ) -> None:
        self._compiling, self._stalled, self._works = compiling, stalled, works
        self._stalls: Stalls[C] = Stalls(seconds)
        self._thread = DiskThread("stalls")
        self.chores = [Chore("stalls", self._thread, self._look, notices, every=every)] if seconds else []

    async def _look(self) -> None:
        compiling, now = dict(self._compiling()), time.monotonic()
        for found in await self._thread.run(lambda: self._stalls.look(compiling, now)):
            self._stalled(found)
        for found in self._stalls.working:
            self._works(found)
