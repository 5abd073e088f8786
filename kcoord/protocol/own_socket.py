"""A socket that survives a script which closes all descriptors, and reuses their numbers."""

from __future__ import annotations

import fcntl
import os
import socket


class OwnSocket(socket.socket):
    """Takes over the descriptor of `taken`. Check `is_ours` before each use; `close` does so itself.

    Scripts close descriptors that they did not open (``os.closerange(3, …)``, as daemons do). The next file that the script opens
    then has our number: our frames would go into it, and our `close` would close it. The descriptor is above 2, also where the
    script has closed its standard streams: libraries write to these, and a child gets others.
    """

    def __init__(self, taken: socket.socket) -> None:
        timeout = taken.gettimeout()
        super().__init__(taken.family, taken.type, taken.proto, _above_the_streams(taken.detach()))
        self.settimeout(timeout)
        self._identity = _identity_of(self.fileno())

    def is_ours(self) -> bool:
        return self.fileno() >= 0 and _identity_of(self.fileno()) == self._identity

    def close(self) -> None:
        if self.is_ours():
            super().close()
        else:
            self.detach()


def _above_the_streams(descriptor: int) -> int:
    if descriptor > 2:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(descriptor)


def _identity_of(descriptor: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(descriptor)
    except OSError:
        return None
    return found.st_dev, found.st_ino
