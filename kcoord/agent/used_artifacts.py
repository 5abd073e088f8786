"""The artifacts that this agent's ranks use, for the pack of their profile."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from kcoord.latest import Latest
from kcoord.packs.index import MOST_LISTED, Use, is_digest, is_place
from kcoord.packs.recipe import today


class UsedArtifacts:
    """Artifacts that ranks asked for and the store has: the latest, a bounded number.

    `count` grows with each new one, and `asks` with each that a rank asks for first, in the store or not.
    """

    def __init__(self, local_dir: Path) -> None:
        self._below = f"{local_dir}{os.sep}"
        self._places: Latest[str, str] = Latest(MOST_LISTED)  # by digest: all that ranks asked for
        self._stored: Latest[str, None] = Latest(MOST_LISTED)  # digests
        self._loaded: Latest[str, None] = Latest(MOST_LISTED)  # beginnings of digests
        self.count = self.asks = 0

    def asked(self, digest: str, home: str) -> None:
        """A rank asked for the artifact of the key `digest`, for `home`. A text that is no digest is ignored."""
        if not is_digest(digest):
            return
        place = home[len(self._below) :] if home.startswith(self._below) else ""
        if digest not in self._places:
            self.asks += 1
            self.count += digest in self._stored
        self._places[digest] = place if is_place(place) else ""

    def stored(self, digest: str) -> None:
        """The store has the artifact: this agent has published it, or fetched it from there or from a pack."""
        self.count += digest in self._places and digest not in self._stored
        self._stored[digest] = None

    def loaded(self, digests: Iterable[str]) -> None:
        """Ranks loaded the artifacts whose digests begin so, from this node's disk or elsewhere."""
        for digest in digests:
            self._loaded[digest] = None

    def uses(self) -> list[Use]:
        """The artifacts, the latest asked for first, as used today."""
        day = today()
        return [Use(digest, place, day) for digest, place in reversed(self._places.items()) if digest in self._stored]

    @property
    def loads(self) -> frozenset[str]:
        """Beginnings of the digests of artifacts that ranks loaded."""
        return frozenset(self._loaded.keys())
