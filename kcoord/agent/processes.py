"""Whether a peer's process still lives, told the moment it does not.

`SO_PEERCRED` names the process at the other end of a Unix socket, and a pidfd becomes readable when that process ends, also
by SIGKILL, also while a forked child keeps the socket open. Where the kernel has no pidfd, or the process is in a pid
namespace that the agent does not see, the socket's end is all there is.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

_UCRED = struct.Struct("3i")


@dataclass(frozen=True)
class Peer:
    """The process that connected: `pid` is 0 if it is in a namespace that we do not see."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


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
