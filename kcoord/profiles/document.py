"""A profile as one document of a bundle: its recipes and its requested artifacts. Equal profiles make equal bytes."""

from __future__ import annotations

from collections.abc import Iterable

import msgpack

from kcoord.files.packed import unpack
from kcoord.profiles.parts import decode_part, encode_part
from kcoord.profiles.recipe import Recipe, merge
from kcoord.profiles.requested import MOST_REQUESTED, RequestedArtifact


def encode(recipes: Iterable[Recipe], requested: Iterable[RequestedArtifact]) -> bytes:
    places = sorted({(artifact.digest, artifact.place) for artifact in requested})
    return bytes(msgpack.packb([encode_part(merge(recipes)), places]))


def decode(data: bytes) -> tuple[list[Recipe], list[RequestedArtifact]]:
    """Raises ValueError if it is torn or malformed."""
    try:
        part, places = unpack(data, 3 + 3 * MOST_REQUESTED)
        if not isinstance(part, bytes) or not isinstance(places, list) or len(places) > MOST_REQUESTED:
            raise ValueError("it holds something else")
        return decode_part(part), [RequestedArtifact.from_wire(place) for place in places]
    except TypeError as error:
        raise ValueError(f"it is no profile: {error}") from error
