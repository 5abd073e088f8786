"""The end of a peer's process, noticed at once.

A pidfd becomes readable when its process ends, also by SIGKILL, also while a forked child keeps the process's socket open.
Where the kernel has no pidfd, or the agent does not see the pid namespace of the process, the end of the socket has to do.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable


class ProcessWatch:
    """Calls `on_exit` once when process `pid` ends. Close it when it is not needed any more."""

    def __init__(self, pid: int, on_exit: Callable[[], None]) -> None:
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._fd = -1
        try:
            self._fd = os.pidfd_open(pid) if pid > 0 else -1
        except ProcessLookupError:
            self._loop.call_soon(on_exit)  # it ended before we looked
        except OSError:
            return  # no pidfd in this kernel or sandbox: the socket's end must do
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
            os.close(self._fd)
            self._fd = -1
