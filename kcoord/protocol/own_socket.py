"""A socket that is kept while the script runs, which may close all descriptors and open others by the same numbers."""

from __future__ import annotations

import fcntl
import os
import socket


class OwnSocket(socket.socket):
    """`taken`, whose descriptor it takes over. Look whether it `is_ours` before it is used; `close` does so itself.

    Scripts close what they did not open (``os.closerange(3, …)``, as daemons do). The number is then the next file's that they
    open: what we sent would go there, and our `close` would be its end. Nor is its number a standard stream's, where the script
    has closed its own: libraries write to these, and a child's are its own.
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
