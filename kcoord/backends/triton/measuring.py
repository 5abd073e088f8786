"""The measurements of one tuning, divided among the ranks of the node: each measures what no other has. Nobody waits.

Others' measurements are untrusted. An exception of Triton's while this rank measures is the job's, as without kcoord; a fault of
kcoord ends the sharing, and this rank measures the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kcoord.backends.fail_open import fails_open
from kcoord.backends.triton import choice
from kcoord.protocol.messages import Measurements
from kcoord.rank.choices import Choices

Measure = Callable[[Any], Any]
"""Measures a configuration here."""


class Measuring:
    """`configs` are in the order in which all ranks have them; `digest` is of `choice.measured_as`, or empty.

    ``runs(config)`` compiles a configuration, and tells whether it runs on this GPU. `own`: what this rank measured.
    """

    def __init__(self, choices: Choices, digest: str, configs: Sequence[Any], runs: Callable[[Any], bool]) -> None:
        self._choices, self._digest, self._configs, self._runs = choices, digest, configs, runs
        self.own: dict[Any, Any] = {}
        self._found: dict[Any, Any] | None = None

    def timing(self, config: Any, measure: Measure) -> Any:
        """The measurement of `config`, by this rank or another. Raises what `measure` raises."""
        if self._found is None:
            self._found = self._shared(measure)
        return self._found[config] if config in self._found else self._measured(config, measure)

    def _shared(self, measure: Measure) -> dict[Any, Any]:
        """The measurements of all configurations, or this rank's where the others' cannot be had."""
        answer, given = self._asked(None, None), set()
        while answer is not None and answer.next is not None and 0 <= answer.next < len(self._configs):
            if answer.next in given:
                return self.own  # another agent, which knows of no measurement
            given.add(answer.next)
            packed = choice.pack_timing(self._measured(self._configs[answer.next], measure))
            answer = None if packed is None else self._asked(answer.next, packed)
        return self.own if answer is None else self._with_others(answer)

    def _measured(self, config: Any, measure: Measure) -> Any:
        if config not in self.own:
            self.own[config] = measure(config)
        return self.own[config]

    @fails_open(lambda self, *arguments: None)
    def _asked(self, index: int | None, packed: bytes | None) -> Measurements | None:
        if not self._digest:
            return None
        return self._choices.next_measurement(self._digest, len(self._configs), index, packed)

    @fails_open(lambda self, answer: self.own)
    def _with_others(self, answer: Measurements) -> dict[Any, Any]:
        timings = zip(self._configs, map(choice.timing_in, answer.timings), strict=False)
        found = {config: timing for config, timing in timings if timing is not None} | self.own
        if not found or not choice.are_comparable(found.values()):
            return self.own  # others measure otherwise
        best = min(found, key=found.__getitem__)
        if best not in self.own and choice.is_finite(found[best]) and not self._runs(best):
            return self.own  # this GPU is another, whatever its name
        return found
