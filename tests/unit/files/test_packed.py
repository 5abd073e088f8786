"""msgpack of others is unpacked if it holds few values, whatever their kinds."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.files.reading import unpack

_texts = st.text(max_size=300) | st.binary(max_size=70_000)
_numbers = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False)
_extensions = st.builds(msgpack.ExtType, st.integers(0, 127), st.binary(max_size=300))
_plain = st.recursive(
    _texts | _numbers | _extensions,
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=5), inner, max_size=20),
)


def count(value: Any) -> int:
    if isinstance(value, list):
        return 1 + sum(map(count, value))
    return 1 + sum(1 + count(each) for each in value.values()) if isinstance(value, dict) else 1


@given(_plain)
def test_a_document_of_so_many_values_is_unpacked_and_one_more_is_refused(value: Any) -> None:
    content, values = msgpack.packb(value), count(value)
    assert unpack(content, values) == value
    if len(content) > values - 1 > 0:
        with pytest.raises(ValueError, match="values"):
            unpack(content, values - 1)


@pytest.mark.parametrize("head", [b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff"])
def test_a_count_that_is_only_stated_is_refused(head: bytes) -> None:
    with pytest.raises(ValueError, match=r"values|msgpack"):
        unpack(head + b"\x00" * 200, 100)


@given(st.binary(max_size=300))
def test_bytes_of_no_format_raise_value_error_or_are_a_document(content: bytes) -> None:
    with contextlib.suppress(ValueError, TypeError):  # TypeError: a map's key that cannot be one
        unpack(content, 100, strict_map_key=False)


def test_a_deep_document_raises_value_error() -> None:
    with pytest.raises(ValueError, match="msgpack"):
        unpack(b"\x91" * 100_000 + b"\x00", 1_000_000)
