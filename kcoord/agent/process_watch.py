"""Watches for the end of a process.

A pidfd becomes readable when its process ends, also by SIGKILL, also while a forked child keeps the process's socket open.
Where the kernel has no pidfd the end of the socket has to do; so it is where the agent does not see the pid namespace of the
process, and got no descriptor from it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

from kcoord.protocol.frames import is_pidfd


class ProcessWatch:
    """Calls `on_exit` once when a process ends: that of the pidfd in `passed`, else `pid`. Close it afterwards.

    `passed`: descriptors that the process sent, which are closed here. `pid` is 0 if it is not known.
    """

    def __init__(self, pid: int, on_exit: Callable[[], None], passed: Iterable[int] = ()) -> None:
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._fd, self._place = -1, -1
        for descriptor in passed:
            if self._fd < 0 and is_pidfd(descriptor):
                self._fd = descriptor
            elif self._place < 0:
                self._place = descriptor  # `kcoord.stalls` judges it when it matters
            else:
                os.close(descriptor)
        self.directory = f"/proc/self/fd/{self._place}" if self._place >= 0 else f"/proc/{pid}" if pid > 0 else ""
        """The directory of the process in a procfs, its own or ours; empty if there is none."""
        if self._fd < 0 and pid > 0:
            try:
                self._fd = os.pidfd_open(pid)
            except ProcessLookupError:
                self._loop.call_soon(on_exit)  # it ended before we looked
            except (AttributeError, OSError):
                return  # no pidfd in this kernel, Python or sandbox: the socket's end must do
        if self._fd >= 0:
            self._loop.add_reader(self._fd, self._exited)

    @property
    def works(self) -> bool:
        return self._fd >= 0

    def _exited(self) -> None:
        self.close()
        self._on_exit()

    def close(self) -> None:
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
        for descriptor in (self._fd, self._place):
            if descriptor >= 0:
                os.close(descriptor)
        self._fd, self._place, self.directory = -1, -1, ""
