"""A long-lived socket in a script that may close all descriptors and open other files with the same numbers."""

from __future__ import annotations

import fcntl
import os
import socket


class OwnSocket(socket.socket):
    """Takes over the descriptor of `taken`. Call `check` before each use; `close` does so itself.

    Scripts close descriptors that they did not open (``os.closerange(3, …)``, as daemons do), and the next file that they open
    gets the number: a send would write to that file, and a `close` would close it. Nor does the socket use the number of a
    standard stream that the script has closed: libraries write to these, and a child has its own.
    """

    def __init__(self, taken: socket.socket) -> None:
        timeout = taken.gettimeout()
        super().__init__(taken.family, taken.type, taken.proto, _above_the_streams(taken.detach()))
        self.settimeout(timeout)
        self._identity = _identity_of(self.fileno())

    def is_ours(self) -> bool:
        return self.fileno() >= 0 and _identity_of(self.fileno()) == self._identity

    def check(self) -> None:
        """Raises ConnectionResetError if this is not `is_ours`."""
        if not self.is_ours():
            raise ConnectionResetError("the script has closed its descriptor")

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
