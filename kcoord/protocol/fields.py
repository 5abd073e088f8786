"""Fields of messages, checked once, at the edge. Everything here raises `ProtocolError`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

from kcoord.errors import ProtocolError
from kcoord.keys.cache_key import CacheKey
from kcoord.telemetry.job_names import directory_name, job_of
from kcoord.telemetry.spans import plain_text

LARGEST_KEY = 2 << 20  # bytes of a key; a manifest has room for one, and for as much again


LARGEST_DETAILS = 1 << 20  # bytes of what explains a key; what is larger stays with the rank


LONGEST_NAME = 4096  # characters of a backend's and a kernel's name together


LONGEST_JOB = 1000  # characters


LONGEST_PATH = 4095  # bytes; Linux takes no longer one


LONGEST_LOG = 64 << 10  # characters of a compiler's log that travel


HEARTBEAT = 1.0  # seconds between two `waiting` frames, at most


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
