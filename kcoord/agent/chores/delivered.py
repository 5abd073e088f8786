"""Deliveries that have arrived: one whose answer came too late is sent again, and must be counted once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kcoord.errors import ProtocolError
from kcoord.protocol.fields import (
    field,
    optional,
)

_REMEMBERED = 50_000  # processes
_LONGEST_NAME = 64  # characters


class Deliveries:
    """The number of each process's last delivery, for the processes that delivered last.

    A process numbers its deliveries from 1. It sends one, unchanged, until it is answered, then the next. Not guaranteed: that
    a delivery which an agent counted, and kept, before it ended without an answer is not counted by the next agent, too.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()  # process → number; the latest process comes last

    def is_new(self, message: Mapping[str, Any]) -> bool:
        """True if the delivery `message` is to be counted; from now on it has been. Raises `ProtocolError`.

        One without a process's name or a number is always new.
        """
        process, number = optional(message, "process", str), optional(message, "number", int)
        if process is None or number is None:
            return True
        if len(process) > _LONGEST_NAME:
            raise ProtocolError(f"a process's name has at most {_LONGEST_NAME} characters")
        if number <= self._last.get(process, 0):
            return False
        self._last[process] = number
        self._last.move_to_end(process)
        if len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)
        return True


def without_counts(message: dict[str, Any]) -> None:
    """Take the counters and spans out of a delivery, for all that read it next."""
    field(message, "counters", dict)
    message.update(counters={}, spans=[], dropped=0)
