"""What goes over the agent's Unix socket: frames of msgpack, parsed once, at the edge.

A frame is a 4-byte big-endian length and a msgpack map. A client's first frame is `hello`; the agent answers `welcome`
or closes. After it each request carries an ``id`` that its answers repeat; while a claim waits, the agent sends a
`waiting` frame every second or oftener, so that a rank can tell a long compile from a dead agent. A claim whose `wait` is
false (it may be absent) is answered `busy` rather than wait for another's compile. Any frame to the first rank of a node may
hold `told`: new notices for the user.
"""

from __future__ import annotations

import os
import reprlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack

from kcoord.errors import ProtocolError
from kcoord.keys.cache_key import CacheKey
from kcoord.ranks import ranks_of
from kcoord.settings import PROTOCOL_VERSION

LARGEST_FRAME = 4 << 20
LONGEST_LOG = 64 << 10  # characters of a compiler's log that travel
HEARTBEAT = 1.0  # seconds between two `waiting` frames, at most
_LENGTH = struct.Struct(">I")
HEADER_BYTES = _LENGTH.size


def encode_frame(message: Mapping[str, Any]) -> bytes:
    # a path or a compiler's output may hold bytes that are no UTF-8: Python's surrogates for them travel as they are
    body = bytes(msgpack.packb(message, unicode_errors="surrogatepass"))
    if len(body) > LARGEST_FRAME:
        raise ProtocolError(f"a frame of {len(body)} bytes is too large")
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Raises `ProtocolError` if the peer announces more than a frame may hold."""
    (length,) = _LENGTH.unpack(header)
    if length > LARGEST_FRAME:
        raise ProtocolError(f"the peer announces a frame of {length} bytes")
    return int(length)


def decode_body(body: bytes) -> dict[str, Any]:
    try:
        message = msgpack.unpackb(body, unicode_errors="surrogatepass")
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise ProtocolError(f"the peer's frame is not msgpack: {error}") from error
    if not isinstance(message, dict) or not all(isinstance(k, str) for k in message):
        raise ProtocolError("the peer's frame is not a map")
    return message


@dataclass(frozen=True)
class Identity:
    """Who a client is: its pid in its own namespace, its rank and local rank if it has them, its job, its device."""

    pid: int
    rank: int | None
    local_rank: int | None
    job: str

    def hello(self) -> dict[str, Any]:
        return {
            "op": "hello",
            "protocol": PROTOCOL_VERSION,
            "pid": self.pid,
            "rank": self.rank,
            "local_rank": self.local_rank,
            "job": self.job,
        }

    @classmethod
    def from_hello(cls, message: Mapping[str, Any]) -> Identity:
        if message.get("op") != "hello" or message.get("protocol") != PROTOCOL_VERSION:
            raise ProtocolError(
                f"the peer speaks protocol {reprlib.repr(message.get('protocol'))}, this agent {PROTOCOL_VERSION}: "
                "use one version of kcoord on a node"
            )
        return cls(
            field(message, "pid", int),
            optional(message, "rank", int),
            optional(message, "local_rank", int),
            field(message, "job", str),
        )

    @classmethod
    def here(cls, job: str | None, environ: Mapping[str, str] = os.environ) -> Identity:
        """This process, as torchrun, Slurm, Open MPI, MPICH or PMIx numbered it."""
        ranks = ranks_of(environ)
        return cls(os.getpid(), ranks.rank, ranks.local, job or environ.get("SLURM_JOB_ID") or "default")


def field(message: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """The field `name`, of type `kind`. Raises `ProtocolError`."""
    value = message.get(name)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ProtocolError(f"the field {name!r} must be {kind.__name__}, not {type(value).__name__}")
    return value


def optional(message: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    return None if message.get(name) is None else field(message, name, kind)


def seconds(message: Mapping[str, Any], name: str) -> float:
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ProtocolError(f"the field {name!r} must be a number of seconds")
    return float(value)


def digest(message: Mapping[str, Any]) -> str:
    """A key's digest. Raises `ProtocolError`."""
    digest = field(message, "digest", str)
    if len(digest) != 64 or not set(digest) <= set("0123456789abcdef"):
        raise ProtocolError(f"{digest[:80]!r} is no digest of a key")
    return str(digest)


def directory(message: Mapping[str, Any], name: str) -> Path:
    """An absolute path. Raises `ProtocolError`."""
    path = Path(field(message, name, str))
    try:
        named = b"\0" not in os.fsencode(path)
    except UnicodeEncodeError:
        named = False
    if not named or not path.is_absolute() or ".." in path.parts:
        raise ProtocolError(f"the field {name!r} must be an absolute path")
    return path


def key(message: Mapping[str, Any]) -> CacheKey:
    """A whole key. Raises `ProtocolError`."""
    try:
        return CacheKey.from_wire(field(message, "key", dict))
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"the field 'key' is no key: {error}") from error
