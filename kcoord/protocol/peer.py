"""The process at the other end of a Unix socket: from the kernel's SO_PEERCRED, and from the descriptors that it sends.

A process of another pid namespace has no number here. So a client sends two descriptors of itself with its first frame: a pidfd,
and its directory in its own /proc. The directory rather than its ``stat``: a compiler's child processes use the CPU, too.
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from kcoord.protocol import frames

_UCRED = struct.Struct("3i")
_MOST_DESCRIPTORS = 2  # of one message; the kernel closes more
_FIRST_BYTES = 64 << 10
# too many descriptors are on their way, or this sandbox passes none
_NOT_SENT = (errno.ETOOMANYREFS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)


@dataclass(frozen=True)
class Peer:
    """The process that connected. `pid` is 0 if its pid namespace is not visible from ours."""

    pid: int
    uid: int


def peer_of(connection: socket.socket) -> Peer:
    pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


def send_first_frame(connection: socket.socket, frame: bytes) -> None:
    """Send an encoded frame on a blocking socket, with descriptors of this process if there are any. Raises OSError."""
    descriptors = []
    try:
        with suppress(AttributeError, OSError):  # an old kernel, or a Python that was built on one
            descriptors.append(os.pidfd_open(os.getpid()))
        with suppress(OSError):  # no /proc is mounted, or that of a namespace that does not see us
            descriptors.append(os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        try:
            sent = connection.sendmsg([frame], rights, socket.MSG_NOSIGNAL)
        except OSError as error:
            if error.errno not in _NOT_SENT:
                raise
            sent = 0
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    if sent < len(frame):  # an empty rest would be sent, too, and fail if the agent has refused us meanwhile
        frames.send_frame(connection, frame[sent:])


def receive_first(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The first bytes of a client, and the descriptors that came with them, which are the caller's to close. Raises OSError."""
    size = socket.CMSG_LEN(_MOST_DESCRIPTORS * array.array("i").itemsize)
    data, ancillary, _, _ = connection.recvmsg(_FIRST_BYTES, size, socket.MSG_CMSG_CLOEXEC)
    passed = array.array("i")
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            passed.frombytes(content[: len(content) - len(content) % passed.itemsize])
    return data, list(passed)


def is_pidfd(descriptor: int) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}") == "anon_inode:[pidfd]"  # noqa: PTH115 - it is no path
    except OSError:
        return False
