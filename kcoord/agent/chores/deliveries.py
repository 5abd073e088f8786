"""Deliveries that have arrived: one whose answer came too late is sent again, and counted once."""

from __future__ import annotations

from kcoord.latest import Latest
from kcoord.protocol.messages import Deliver

_REMEMBERED = 50_000  # processes


class Deliveries:
    """The number of each process's last delivery, for the processes that delivered last.

    A process numbers its deliveries from 1, and sends one, unchanged, until it is answered, before the next. Not guaranteed: a
    delivery whose agent counts it, and ends before it answers, is counted by the next agent too.
    """

    def __init__(self) -> None:
        self._last: Latest[str, int] = Latest(_REMEMBERED)  # process → number

    def new(self, message: Deliver) -> bool:
        """True if the delivery is to be counted; from now on it has been. One without a process or a number always is."""
        process, number = message.process, message.number
        if process is None or number is None:
            return True
        if number <= self._last.get(process, 0):
            return False
        self._last[process] = number
        return True
