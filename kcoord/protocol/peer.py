"""Who is at the other end of a Unix socket, as the kernel says it."""

from __future__ import annotations

import socket
import struct
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
