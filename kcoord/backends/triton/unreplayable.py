"""The error of a recipe that cannot be replayed."""

from __future__ import annotations

from kcoord.errors import KcoordError


class Unreplayable(KcoordError):
    """A recipe that does not lead to a kernel here. The message says why."""
