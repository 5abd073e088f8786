"""A bar on a terminal for what reads many artifacts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


@contextmanager
def bar(
    title: str, amount: ProgressColumn | None = None, *, quiet: bool = False
) -> Iterator[Callable[[int, int | None], object]]:
    """Yields ``progress(done, all)``, of bytes if `amount` shows nothing else; all is None where nobody knows.

    Nothing is shown where stderr is no terminal, or if `quiet`.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda done, every: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), amount or DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(title, total=None)
        yield lambda done, every: shown.update(task, completed=done, total=every)
