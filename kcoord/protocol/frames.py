"""Frames of the agent socket: a 4-byte big-endian length and a msgpack map."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import msgpack

from kcoord.errors import ProtocolError

LARGEST_FRAME = 4 << 20  # bytes of the body
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
    if not isinstance(message, dict) or not all(isinstance(k, str) for k in message):
        raise ProtocolError("the peer's frame is not a map")
    return message
