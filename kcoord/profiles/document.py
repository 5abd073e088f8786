"""A profile as one document that travels: its recipes, and what its jobs needed. Equal profiles make equal bytes."""

from __future__ import annotations

from collections.abc import Iterable

import msgpack

from kcoord.profiles.parts import decode_part, encode_part
from kcoord.profiles.recipe import Recipe, merge
from kcoord.profiles.requested import MOST_NEEDS, Need


def encode(recipes: Iterable[Recipe], needs: Iterable[Need]) -> bytes:
    places = sorted({(need.digest, need.place) for need in needs})
    return bytes(msgpack.packb([encode_part(merge(recipes)), places]))


def decode(data: bytes) -> tuple[list[Recipe], list[Need]]:
    """Raises ValueError if it is torn, or not tame."""
    try:
        part, places = msgpack.unpackb(data)
        if not isinstance(part, bytes) or not isinstance(places, list) or len(places) > MOST_NEEDS:
            raise ValueError("it holds something else")
        return decode_part(part), [Need(*place) for place in places]
    except (TypeError, msgpack.exceptions.UnpackException) as error:
        raise ValueError(f"it is no profile: {error}") from error
