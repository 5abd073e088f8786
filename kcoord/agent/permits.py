"""Permits to compile ahead: for so many workers as there are idle cores and free memory, where the workers run."""

from __future__ import annotations

_MEMORY = 1 << 30  # bytes that must be free for one more: a compiler; the rest of a worker is shared with the others


class Permits:
    """A permit belongs to a worker's connection, and ends with it."""

    def __init__(self) -> None:
        self._holders: set[int] = set()
        self._new: set[int] = set()  # holders whose memory is not missing yet in what is free

    def ask(self, owner: int, most: int, memory: int, idle: float, left: float) -> bool:
        """True if `owner` may compile one more key now, as one of at most `most`. A refusal ends the permit that it had.

        `memory`: bytes that are free where it runs. `idle` and `left`: cores there (`kcoord.cgroups.IdleCores`).
        """
        others, new = len(self._holders - {owner}), len(self._new - {owner})
        room = min(idle, left + len(self._holders))  # the quota counts what the holders use
        if others < most and others + 0.5 < room and memory >= _MEMORY * (1 + new):
            if owner not in self._holders:
                self._new.add(owner)
            self._holders.add(owner)
            return True
        self.gone(owner)
        return False

    def gone(self, owner: int) -> None:
        self._holders.discard(owner)
        self._new.discard(owner)

    def look(self) -> None:
        """Call it about once a second."""
        self._new.clear()
