"""The cold start of each job on this node: its last new kernel, and the seconds that compiling and waiting took."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kcoord.latest import Latest
from kcoord.protocol.identity import Identity
from kcoord.telemetry.spans import Span

_MOST_JOBS = 64
_MOST_PROCESSES = 10_000  # of a job
_LONGEST_PAUSE = 60.0  # seconds; a kernel that is new after a longer pause belongs to no cold start
_COLD = ("compile", "wait")


@dataclass
class _ColdStart:
    ended: float = 0.0
    seconds: dict[int, float] = field(default_factory=dict)  # by process


class ColdStarts:
    def __init__(self) -> None:
        self._jobs: Latest[str, _ColdStart] = Latest(_MOST_JOBS)

    def add(self, who: Identity, spans: Iterable[Span]) -> None:
        """Take the spans that a rank has delivered."""
        for span in spans:
            if span.kind not in _COLD:
                continue
            start = self._jobs[who.job] = self._jobs.get(who.job) or _ColdStart()
            if start.ended and span.begin > start.ended + _LONGEST_PAUSE:
                continue
            start.ended = max(start.ended, span.end)
            if who.pid in start.seconds or len(start.seconds) < _MOST_PROCESSES:
                start.seconds[who.pid] = start.seconds.get(who.pid, 0.0) + span.seconds

    def of(self, job: str | None) -> dict[str, Any] | None:
        """``ended``, in Unix seconds, and ``seconds`` of the slowest process; None for a job that had all its kernels."""
        start = self._jobs.get(job or "")
        return None if start is None else {"ended": start.ended, "seconds": max(start.seconds.values(), default=0.0)}
