"""Progress of a whole job's warm-up, as one rank sees it: from its own walk, its agent's flights and the job's counters."""

from __future__ import annotations

from typing import Any

from kcoord.protocol.identity import Identity
from kcoord.rank.coordinator import Coordinator
from kcoord.telemetry.progress import Look


class Overview:
    """Look once before the walk: earlier compiles of the job do not count. A look may take seconds.

    Not guaranteed: exact figures. Figures arrive after each compile, and are this node's, as flights are.
    """

    def __init__(self, coordinator: Coordinator, keys: int) -> None:
        self._coordinator, self._keys = coordinator, keys
        self._job = Identity.here(coordinator.settings.job).job
        self._before: int | None = None
        self._walked = 0  # keys that this rank has finished

    def advance(self, done: int, total: int) -> None:
        """This rank's walk has finished `done` keys."""
        self._walked = done

    def look(self) -> Look:
        compiles = self._compiles()
        if self._before is None:
            self._before = compiles
        compiled = min(self._keys, max(0, compiles - self._before))
        done = min(self._keys, max(self._walked, compiled))
        status = self._coordinator.status() or {}
        flights = [f for f in status.get("flights", ()) if f.get("state") == "compiling"]
        at = (f"{f['leader']}: {f['name'].partition(':')[2]} {f['seconds']:.1f} s" for f in flights)
        return Look(done, compiled, tuple(at))

    def _compiles(self) -> int:
        reply: dict[str, Any] = self._coordinator.stats(self._job) or {}
        return int(reply.get("figures", {}).get("compiles", 0))
