"""Frames of the agent socket, a 4-byte big-endian length and a msgpack map; and the process at its other end.

The kernel names that process (SO_PEERCRED), but one of another pid namespace has no number here. So a client sends two
descriptors of itself with its first frame: a pidfd, and its directory in its own /proc. The directory rather than its ``stat``:
a compiler's child processes use the CPU, too.
"""

from __future__ import annotations

import array
import errno
import math
import os
import socket
import struct
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack

from kcoord.errors import ProtocolError

LARGEST_FRAME = 4 << 20  # bytes of the body
_TEXT = {str}
_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size
_UCRED = struct.Struct("3i")
_MOST_DESCRIPTORS = 2  # of one message; the kernel closes more
_FIRST_BYTES = 64 << 10
# too many descriptors are on their way, or this sandbox passes none
_NOT_SENT = (errno.ETOOMANYREFS, errno.EINVAL, errno.EPERM, errno.EOPNOTSUPP)


def encode_frame(message: Mapping[str, Any]) -> bytes:
    """Raises `ProtocolError` if `message` is too large for a frame."""
    # a path or a compiler's output may hold bytes that are no UTF-8: Python's surrogates for them travel as they are
    body = bytes(msgpack.packb(message, unicode_errors="surrogatepass"))
    if len(body) > LARGEST_FRAME:
        raise ProtocolError(f"a frame of {len(body)} bytes is too large")
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Bytes of the body. Raises `ProtocolError` if the peer announces more than a frame may hold."""
    (length,) = _LENGTH.unpack(header)
    if length > LARGEST_FRAME:
        raise ProtocolError(f"the peer announces a frame of {length} bytes")
    return int(length)


def decode_body(body: bytes) -> dict[str, Any]:
    """Raises `ProtocolError` if `body` is no msgpack map with text keys."""
    try:
        message = msgpack.unpackb(body, unicode_errors="surrogatepass")
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"the peer's frame is not msgpack: {error}") from error
    if not isinstance(message, dict) or not {*map(type, message)} <= _TEXT:
        raise ProtocolError("the peer's frame is not a map")
    return message


def send_frame(connection: socket.socket, frame: bytes) -> None:
    """Send an encoded frame on a blocking socket. Without SIGPIPE: a script that restored its default action would end."""
    connection.sendall(frame, socket.MSG_NOSIGNAL)


def receive_frame(connection: socket.socket) -> dict[str, Any]:
    """The next message on a blocking socket, within the socket's timeout: for its first byte, and again for the rest.

    Raises TimeoutError, ConnectionResetError if the peer closed it, OSError, and `ProtocolError`.
    """
    return decode_body(_received(connection, frame_length(_received(connection, HEADER_BYTES))))


def _received(connection: socket.socket, length: int) -> bytes:
    buffer, patience = bytearray(), connection.gettimeout()
    deadline = math.inf
    while len(buffer) < length:
        if time.monotonic() > deadline:
            raise TimeoutError("the agent's answer comes too slowly")
        chunk = connection.recv(length - len(buffer))
        if not chunk:
            raise ConnectionResetError("the agent closed the connection")
        buffer += chunk
        deadline = min(deadline, math.inf if patience is None else time.monotonic() + patience)
    return bytes(buffer)


# The peer.


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
        send_frame(connection, frame[sent:])


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
