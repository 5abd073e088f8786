"""Frames of the agent socket: a 4-byte big-endian length and a msgpack map."""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import msgpack

from kcoord.errors import ProtocolError

LARGEST_FRAME = 4 << 20  # bytes of the body
_TEXT = {str}
_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size


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
