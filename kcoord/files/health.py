"""The state of a file system that many use at once, as their results tell it.

A result may be old: a use that began before a fault, and succeeds during it, does not end the fault; one that began during a
fault, and fails after its end, is no new fault. So each use remembers the *period* in which it began. A period is a time in which
the file system is well, or one fault.
"""

from __future__ import annotations

from enum import Enum, auto


class State(Enum):
    WELL = auto()
    FAULTY = auto()  # uses fail, at once: it is full, read-only, gone
    SILENT = auto()  # it does not answer, or was never opened: it is not used


class Health:
    """`period` and `faults` count up."""

    def __init__(self, state: State = State.WELL) -> None:
        self.state = state
        self.period = self.faults = int(state is not State.WELL)

    def failed(self, began: int, *, silent: bool = False) -> bool:
        """A use that began in the period `began` has failed. True: by the present fault, which may begin with it. False: by an
        earlier fault, or an unknown one.
        """
        if self.state is State.WELL and began == self.period:
            self.state = State.FAULTY
            self.period += 1
            self.faults += 1
        present = self.state is not State.WELL and began >= self.period - 1
        if present and silent:
            self.state = State.SILENT
        return present

    def worked(self, began: int) -> bool:
        """A use that began in the period `began` did everything that publishing does. True: that is the end of the fault."""
        if self.state is State.WELL or began != self.period:
            return False
        self.state = State.WELL
        self.period += 1
        return True
