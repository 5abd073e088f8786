"""Readers of a message's fields, and the bounds of what travels. Everything here raises `ProtocolError`.

`kcoord.protocol.messages` names each field's reader.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

from kcoord.errors import ProtocolError
from kcoord.keys.cache_key import CacheKey
from kcoord.telemetry.spans import directory_name, job_of, plain_text

LARGEST_KEY = 2 << 20  # bytes of a key; a manifest has room for one, and for as much again
LARGEST_DETAILS = 1 << 20  # bytes of the details that explain a key; larger ones stay with the rank
LONGEST_NAME = 4096  # characters of a backend's and a kernel's name together
LONGEST_JOB = 1000  # characters
LONGEST_PATH = 4095  # bytes; Linux takes no longer one
LONGEST_LOG = 64 << 10  # characters of a compiler's log that travel
_DIGEST = re.compile("[0-9a-f]{64}")
_PATHS_REMEMBERED = 2048  # of a kilobyte, usually

_MOST_COUNTED = 1 << 40  # of anything

HEARTBEAT = 1.0  # seconds between two `waiting` frames, at most

Reader = Callable[[Mapping[str, Any], str], Any]
"""``read(message, name)``: the checked value of the field `name`."""


def field(message: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    """The field `name`, of type `kind`; a bool is no int."""
    value = message.get(name)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ProtocolError(f"the field {name!r} must be {kind.__name__}, not {type(value).__name__}")
    return value


def optional(message: Mapping[str, Any], name: str, kind: type[Any]) -> Any:
    return None if message.get(name) is None else field(message, name, kind)


def number(message: Mapping[str, Any], name: str) -> float:
    """A count or seconds: not negative, and less than 1e9."""
    value = message.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ProtocolError(f"the field {name!r} must be a number that is not negative")
    return float(value)


def count(message: Mapping[str, Any], name: str) -> int:
    found: int = field(message, name, int)
    if not 0 <= found <= _MOST_COUNTED:
        raise ProtocolError(f"the field {name!r} must be a count")
    return found


def digest(message: Mapping[str, Any], name: str) -> str:
    """A key's digest."""
    found: str = field(message, name, str)
    if not _DIGEST.fullmatch(found):
        raise ProtocolError(f"{found[:80]!r} is no digest of a key")
    return found


def text(message: Mapping[str, Any], name: str) -> str:
    """A text for people: cut, and printable."""
    return plain_text(field(message, name, str))


def log(message: Mapping[str, Any], name: str) -> str:
    return shortened_log(field(message, name, str))


def shortened_log(log: str) -> str:
    """The end of a compiler's log, as UTF-8 can encode it."""
    return log[-LONGEST_LOG:].encode("utf-8", "replace").decode()


def job(message: Mapping[str, Any], name: str) -> str:
    return job_name(field(message, name, str))


def job_name(job: str) -> str:
    """A job's name; a name longer than `LONGEST_JOB` is replaced by a short one that has the same directory."""
    return job if len(job) <= LONGEST_JOB else job_of(Path(directory_name(job)))


def directory(message: Mapping[str, Any], name: str) -> Path:
    """An absolute path that a file may have."""
    text: str = field(message, name, str)
    path = _absolute(text) if len(text) <= LONGEST_PATH else None  # what is remembered has a bound
    if path is None:
        raise ProtocolError(f"the field {name!r} must be an absolute path of at most {LONGEST_PATH} bytes")
    return path


@functools.lru_cache(_PATHS_REMEMBERED)
def _absolute(text: str) -> Path | None:
    """None if no file has this path. Ranks of a node name the same homes: parsing a path costs as much as the rest of a claim."""
    path = Path(text)
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        return None
    fits = b"\0" not in encoded and len(encoded) <= LONGEST_PATH
    return path if fits and path.is_absolute() and ".." not in path.parts else None


def key(message: Mapping[str, Any], name: str) -> CacheKey:
    """A whole key."""
    try:
        found = CacheKey.from_wire(field(message, name, dict))
    except (ValueError, TypeError, KeyError) as error:
        raise ProtocolError(f"the field {name!r} is no key: {error}") from error
    check_key(found)
    return found


def check_key(key: CacheKey) -> None:
    """Check that a frame, and a manifest, have room for `key` without its details."""
    if len(key.backend) + len(key.name) > LONGEST_NAME:
        raise ProtocolError(f"a key's name of {len(key.backend) + len(key.name)} characters is too large to be shared")
    size = len(msgpack.packb([factor.to_wire() for factor in key.factors], unicode_errors="surrogatepass"))
    if size > LARGEST_KEY:
        raise ProtocolError(f"a key of {size} bytes is too large to be shared")


def carried(key: CacheKey) -> CacheKey:
    """`key` as it travels: without its details, which only explain it, if they are too large."""
    check_key(key)
    details = msgpack.packb([detail.to_wire() for detail in key.details], unicode_errors="surrogatepass")
    return key if len(details) <= LARGEST_DETAILS else replace(key, details=())
