"""Permits to compile ahead: for so many processes as this node has idle cores and free memory."""

from __future__ import annotations

import psutil

from kcoord.cgroups import cores

_MEMORY = 1 << 30  # bytes that must be free for one more: a compiler; the rest of a worker is shared with the others


class Permits:
    """At most `most` permits at a time. A permit belongs to a client's connection, and ends with it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._holders: set[int] = set()
        self._since_look: set[int] = set()  # holders that the last look at the cores did not see at work
        self._idle = cores()
        psutil.cpu_times_percent()  # the next call is about the time since this one

    def ask(self, owner: int, memory: int) -> bool:
        """True if `owner` may compile one more key now. A refusal ends the permit that it had.

        `memory`: bytes that are free where it runs, which may be another container than the agent's, with limits of its own.
        """
        others, unseen = self._holders - {owner}, len(self._since_look - {owner})
        free = self._idle - unseen + (owner in self._holders)
        if len(others) < self._most and free > 0.5 and memory >= _MEMORY * (1 + unseen):
            if owner not in self._holders:
                self._since_look.add(owner)
            self._holders.add(owner)
            return True
        self.gone(owner)
        return False

    def gone(self, owner: int) -> None:
        self._holders.discard(owner)
        self._since_look.discard(owner)

    def look(self) -> None:
        """Count the cores that have idled since the last look. Call it about once a second."""
        times = psutil.cpu_times_percent()
        idle = times.idle + getattr(times, "iowait", 0.0)
        self._idle = min(cores(), (psutil.cpu_count() or 1) * idle / 100)
        self._since_look.clear()
