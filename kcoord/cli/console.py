"""Tables and progress bars. Control characters in names from a store do not reach the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.segment import Segment

from kcoord.telemetry.events import plain


class Console(console.Console):
    """rich's console. It replaces control characters of texts, and writes its own."""

    def render(
        self, renderable: console.RenderableType, options: console.ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(plain(segment.text), segment.style)


@contextmanager
def bar(
    title: str, amount: ProgressColumn | None = None, *, quiet: bool = False
) -> Iterator[Callable[[int, int | None], object]]:
    """Yields ``progress(done, total)``, in bytes unless `amount` shows another unit; total is None if it is unknown.

    Shows nothing if `quiet`, or if stderr is no terminal.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda done, total: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), amount or DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, total: shown.update(task, completed=done, total=total)
