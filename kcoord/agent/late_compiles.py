"""Compiles long after a job's last kernel: a new shape, say, in one rank, while the others wait for that rank in a collective."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kcoord.latest import Latest

_MOST_JOBS = 64
Compile = tuple[str, str, str, float]
"""Job, rank for people, kernel, and since when, in seconds."""


class LateCompiles:
    """Tells one such compile of each job. `after`: seconds of the compile. `quiet`: seconds before it without a new kernel."""

    def __init__(self, after: float = 10.0, quiet: float = 20.0) -> None:
        self._after, self._quiet = after, quiet
        self._told: Latest[str, None] = Latest(_MOST_JOBS)

    def look(self, compiles: Iterable[Compile], last: Callable[[str], float], now: float) -> list[str]:
        """Lines about `compiles`, which are under way. ``last(job)`` is the moment of the job's last kernel; 0: it had none."""
        lines = []
        for job, who, name, since in compiles:
            if (
                now - since < self._after
                or job in self._told
                or not (before := last(job))
                or since - before < self._quiet
            ):
                continue
            self._told[job] = None
            lines.append(
                f"{who} compiles {name} since {now - since:.0f} s, {since - before:.0f} s after the last kernel: other ranks may "
                "be waiting for it in a collective"
            )
        return lines
