"""Several launchers of one node, one agent: ``srun --ntasks-per-node=8 kcoord exec -- …``, ``mpirun -n 8 kcoord exec -- …``.

The first one starts the agent. The others attend it for as long as they run, so that it outlives the first one if that ends
earlier, and ends with the last. Nobody waits for another launcher: a task's exit code is never held back.
"""

from __future__ import annotations

import os
import select
from contextlib import suppress
from dataclasses import replace

from kcoord.protocol.messages import Attend, Done, HandOver, Leave, Left
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices


class Attendance:
    """Keeps an agent that was found here; its connection is all there is to it. Not guaranteed: that there is still an agent."""

    def __init__(self, settings: Settings) -> None:
        self._client = AgentClient(replace(settings, spawn=False), Notices())  # it keeps its one connection
        self._client.ask(Attend(), Done, quietly=True)
        self._ends = 0

    def is_last(self) -> bool:
        """Whether no other launcher attends the agent, or owns it."""
        answer = self._client.ask(Leave(), Left, quietly=True)
        if answer is None:
            return False  # there is no summary to be had from an agent that has gone
        self._ends = answer.ends
        return answer.last

    def end(self, timeout: float) -> None:
        """Leave. If that ends the agent, wait, at most `timeout` seconds, until it has finished its publishes.

        A launcher's end may be the end of the Slurm step, and then of every process in it.
        """
        ended = None
        if self._ends:
            with suppress(OSError):
                ended = os.pidfd_open(self._ends)
        self._client.close()
        if ended is not None:
            poll = select.poll()  # `select` refuses descriptors from 1024 on
            poll.register(ended, select.POLLIN)
            poll.poll(timeout * 1000)
            os.close(ended)


def hand_over(settings: Settings) -> bool | None:
    """Tell our agent that we end. True: other launchers attend it, and it goes on for them. None: it does not answer."""
    client = AgentClient(replace(settings, spawn=False), Notices())
    try:
        answer = client.ask(HandOver(), Left, quietly=True)
    finally:
        client.close()
    return None if answer is None else not answer.last
