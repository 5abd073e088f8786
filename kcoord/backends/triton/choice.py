"""An autotuner's choice as it is shared: the configuration's digest, and the measurements. Other ranks' content is untrusted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgpack

LONGEST_TEXT = 500  # characters
FORMAT = 1
_MOST_TIMINGS = 1000


def pack(digest: str, config: Any, timings: list[Any] | None) -> bytes:
    """`timings` are in the order of the configurations' digests. They are left out if they are not as Triton measures."""
    if timings is not None and (len(timings) > _MOST_TIMINGS or not all(map(_is_timing, timings))):
        timings = None
    document = {"format": FORMAT, "config": digest, "text": str(config)[:LONGEST_TEXT], "timings": timings}
    return bytes(msgpack.packb(document, unicode_errors="surrogatepass"))


def _unpacked(content: bytes) -> dict[str, Any]:
    """The document; empty if `content` is no choice, or another version's."""
    try:
        document = msgpack.unpackb(content, unicode_errors="surrogatepass")
    except (ValueError, msgpack.exceptions.UnpackException):
        return {}
    return document if isinstance(document, dict) and document.get("format") == FORMAT else {}


def chosen_in(content: bytes) -> str:
    """The digest of the configuration; empty if `content` is no choice."""
    digest = _unpacked(content).get("config")
    return digest if isinstance(digest, str) else ""


def timings_in(content: bytes, count: int) -> list[Any] | None:
    """None unless there is one measurement for each configuration, as Triton has them."""
    timings = _unpacked(content).get("timings")
    if not isinstance(timings, list) or len(timings) != count or not all(map(_is_timing, timings)):
        return None
    return timings


def pack_timing(timing: Any) -> bytes | None:
    """One measurement; None if it is not as Triton measures."""
    return bytes(msgpack.packb(timing)) if _is_timing(timing) else None


def timing_in(packed: Any) -> Any | None:
    """None if `packed` is no measurement."""
    try:
        timing = msgpack.unpackb(packed) if isinstance(packed, bytes) else None
    except (ValueError, msgpack.exceptions.UnpackException):
        return None
    return timing if _is_timing(timing) else None


def are_comparable(timings: Iterable[Any]) -> bool:
    """True if the measurements are of one kind: all are numbers, or all have as many quantiles."""
    return len({len(timing) if isinstance(timing, (list, tuple)) else 0 for timing in timings}) <= 1


def _is_timing(value: Any) -> bool:
    """Milliseconds: one number, or one for each quantile. Infinity: it does not run."""
    numbers = value if isinstance(value, list) and 0 < len(value) <= 100 else [value]
    return all(type(number) in (int, float) and number >= 0 for number in numbers)
