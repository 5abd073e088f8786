"""Tables and bars of the command line, which may hold names from a store: a terminal obeys none of them."""

from __future__ import annotations

from collections.abc import Iterator

from rich import console
from rich.segment import Segment

from kcoord.telemetry.events import plain


class Console(console.Console):
    """rich's, which writes texts without control characters, but for its own."""

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)
