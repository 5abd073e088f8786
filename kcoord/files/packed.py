"""Unpacks msgpack that other users may have written, in memory that its bytes do not multiply."""

from __future__ import annotations

from typing import Any

import msgpack

_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8} | {
    0xD4 + power: 1 + (1 << power) for power in range(5)
}
"""Bytes that follow the first one of a value."""
_SIZED = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)} | {
    0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)
}  # fmt: skip
"""Bytes of the length of a text, of bytes or of an extension, and how much it leaves out."""
_HOLDING = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}
"""Bytes of the count of an array or a map, and values for each."""


def unpack(content: bytes, most: int, **options: Any) -> Any:
    """As `msgpack.unpackb`, of a document of at most `most` values: texts, numbers, lists and maps, with those inside.

    An empty list is one byte in a file and 56 in memory, so values are counted before any is made. Raises ValueError for more of
    them, and for anything that is not msgpack.
    """
    if len(content) > most and not _has_at_most(content, most):  # a value has at least a byte
        raise ValueError(f"it holds more than {most} values")
    try:
        return msgpack.unpackb(content, **options)
    except (msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ValueError(f"it is not msgpack: {error}") from error


def _has_at_most(content: bytes, most: int) -> bool:
    """Reads the first bytes of each value, as the format's specification has them (https://msgpack.org). True of what is torn."""
    at, seen, expected, end = 0, 0, 1, len(content)
    while expected and at < end:
        first = content[at]
        at, seen, expected = at + 1, seen + 1, expected - 1
        if first <= 0x7F or first >= 0xE0:
            pass
        elif first <= 0x8F:
            expected += 2 * (first & 0x0F)
        elif first <= 0x9F:
            expected += first & 0x0F
        elif first <= 0xBF:
            at += first & 0x1F
        elif first in _FIXED:
            at += _FIXED[first]
        elif first in _SIZED:
            width, more = _SIZED[first]
            at += width + more + int.from_bytes(content[at : at + width], "big")
        elif first in _HOLDING:
            width, each = _HOLDING[first]
            expected += each * int.from_bytes(content[at : at + width], "big")
            at += width
        if seen + expected > most:
            return False
    return True
