"""Which reports have arrived: one whose answer came too late is sent again, and counted once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kcoord.errors import ProtocolError
from kcoord.protocol.fields import field, optional

_REMEMBERED = 50_000  # processes
_LONGEST_NAME = 64  # characters


class Reports:
    """The number of the last report of each process, of those that reported last.

    A process numbers its reports from 1, and sends one, unchanged, until it is answered, before the next. Not guaranteed: that
    what an agent had counted, and kept, when it ended before it could answer is not counted by the next one, too.
    """

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = (
            OrderedDict()
        )  # process → number; who reported longest ago is forgotten first

    def new(self, message: Mapping[str, Any]) -> bool:
        """Whether the report `message` is to be counted; from now on it has been. Raises `ProtocolError`.

        One that says neither its process nor its number is.
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


def emptied(report: dict[str, Any]) -> None:
    """Take out of a report, which whoever reads it next is to find empty, what would be counted."""
    field(report, "counters", dict)
    report.update(counters={}, spans=[], dropped=0)
