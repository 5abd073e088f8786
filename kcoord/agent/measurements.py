"""Measurements of autotuners: the ranks of a node that tune one key at once share them out. Nobody waits for another rank.

A rank that asks gets a configuration that no other measures, as long as there is one; then one that others are slow to measure.
Once all are measured, by whomever, each rank gets them all, and they are forgotten: what lasts is the choice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kcoord.errors import ProtocolError
from kcoord.latest import Latest
from kcoord.protocol.messages import Measure, Measurements

_MOST_CONFIGURATIONS = 1000
_LARGEST_TIMING = 1000  # bytes
_REMEMBERED = 100  # tunings


@dataclass
class _Tuning:
    """By the configuration's number: how often it was given out, and what was measured. `processes` want to know it all.

    A process is known by two ids: the peer's as the agent sees it, which is 0 in another container, and its own.
    """

    given: list[int]
    timings: list[bytes | None]
    processes: set[tuple[int, int]] = field(default_factory=set)


class SharedMeasurements:
    """Answers `Measure`. It remembers the latest hundred tunings; ranks of an older one measure for themselves."""

    def __init__(self) -> None:
        self._tunings: Latest[str, _Tuning] = Latest(_REMEMBERED)  # by `Measure.digest`

    def answer(self, process: tuple[int, int], message: Measure) -> Measurements:
        """The next configuration to measure; nothing if there are too many. Raises `ProtocolError` for what no autotuner asks."""
        count, index, timing = message.count, message.index, message.timing
        if count > _MOST_CONFIGURATIONS:
            return Measurements()
        if count < 1 or not 0 <= (index or 0) < count or len(timing or b"") > _LARGEST_TIMING:
            raise ProtocolError(f"there is no configuration {index} of {count}, or its measurement is too large")
        tuning = self._tunings.get(message.digest)
        if tuning is None or len(tuning.given) != count:
            tuning = _Tuning([0] * count, [None] * count)
        self._tunings[message.digest] = tuning
        if index is not None and timing is not None:
            tuning.timings[index] = timing
        missing = [number for number, known in enumerate(tuning.timings) if known is None]
        tuning.processes.add(process)
        if not missing:
            tuning.processes.remove(process)
            if not tuning.processes:
                del self._tunings[message.digest]
            return Measurements(timings=tuning.timings)
        chosen = min(missing, key=lambda number: tuning.given[number])
        tuning.given[chosen] += 1
        return Measurements(chosen)
