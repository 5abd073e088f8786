"""Several launchers of one node, one agent: ``srun --ntasks-per-node=8 kcoord exec -- …``, ``mpirun -n 8 kcoord exec -- …``.

The first launcher starts the agent. The others attend it while they run, so that it outlives the first launcher and ends with the
last. No launcher waits for another one: a task's exit code is never delayed.
"""

from __future__ import annotations

import os
import select
from contextlib import closing, suppress
from dataclasses import replace

from kcoord.protocol.messages import Attend, Done, HandOver, Leave, Left
from kcoord.rank.client import AgentClient
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices


class Attendance:
    """Keeps a running agent from ending, by an open connection. Not guaranteed: that the agent is still alive."""

    def __init__(self, settings: Settings) -> None:
        self._client = AgentClient(replace(settings, spawn=False), Notices())  # keeps one open connection
        self._client.ask(Attend(), Done, quietly=True)
        self._ends = 0

    def is_last(self) -> bool:
        """True if no other launcher attends or owns the agent."""
        answer = self._client.ask(Leave(), Left, quietly=True)
        if answer is None:
            return False  # a dead agent has no summary
        self._ends = answer.ends
        return answer.last

    def end(self, timeout: float) -> None:
        """Leave. If that ends the agent, wait at most `timeout` seconds for its last publishes.

        The end of a launcher may end the Slurm step, and every process in it.
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
    """Announce the end of this launcher to its agent. True: the agent stays, for other launchers. None: it does not answer."""
    with closing(AgentClient(replace(settings, spawn=False), Notices())) as client:
        answer = client.ask(HandOver(), Left, quietly=True)
    return None if answer is None else not answer.last
