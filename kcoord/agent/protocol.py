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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack

from kcoord.errors import ProtocolError
from kcoord.keys.cache_key import CacheKey
from kcoord.ranks import ranks_of
from kcoord.settings import PROTOCOL_VERSION
from kcoord.telemetry.job_names import directory_name, job_of
from kcoord.telemetry.spans import plain_text

LARGEST_FRAME = 4 << 20
LARGEST_KEY = 2 << 20  # bytes of a key; a manifest has room for one, and for as much again
LARGEST_DETAILS = 1 << 20  # bytes of what explains a key; what is larger stays with the rank
LONGEST_NAME = 4096  # characters of a backend's and a kernel's name together
LONGEST_JOB = 1000  # characters
LONGEST_PATH = 4095  # bytes; Linux takes no longer one
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
            job_name(field(message, "job", str)),
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


def text(message: Mapping[str, Any], name: str) -> str:
    """A text that is kept for people: short, and it prints. Raises `ProtocolError`."""
    return plain_text(field(message, name, str))


def job_name(job: str) -> str:
    """A job's name, or, of an endless one, a short name that has the same directory."""
    return job if len(job) <= LONGEST_JOB else job_of(Path(directory_name(job)))


def label(backend: str, name: str) -> str:
    """``backend:name`` of a kernel, for people and for what is learned of it: short, and it prints."""
    return f"{plain_text(backend)}:{plain_text(name)}"


def directory(message: Mapping[str, Any], name: str) -> Path:
    """An absolute path that a file may have. Raises `ProtocolError`."""
    path = Path(field(message, name, str))
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded or len(encoded) > LONGEST_PATH or not path.is_absolute() or ".." in path.parts:
        raise ProtocolError(f"the field {name!r} must be an absolute path of at most {LONGEST_PATH} bytes")
    return path


def key(message: Mapping[str, Any]) -> CacheKey:
    """A whole key. Raises `ProtocolError`."""
    try:
        found = CacheKey.from_wire(field(message, "key", dict))
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"the field 'key' is no key: {error}") from error
    check_key(found)
    return found


def check_key(key: CacheKey) -> None:
    """Raises `ProtocolError` if there is no room for `key`, its details apart, in a frame, and in a manifest."""
    if len(key.backend) + len(key.name) > LONGEST_NAME:
        raise ProtocolError(f"a key's name of {len(key.backend) + len(key.name)} characters is too large to be shared")
    size = len(msgpack.packb([factor.to_wire() for factor in key.factors], unicode_errors="surrogatepass"))
    if size > LARGEST_KEY:
        raise ProtocolError(f"a key of {size} bytes is too large to be shared")


def carried(key: CacheKey) -> CacheKey:
    """`key` as it travels: without details if these, which only explain it, are too large. Raises `ProtocolError`."""
    check_key(key)
    details = msgpack.packb([detail.to_wire() for detail in key.details], unicode_errors="surrogatepass")
    return key if len(details) <= LARGEST_DETAILS else replace(key, details=())
