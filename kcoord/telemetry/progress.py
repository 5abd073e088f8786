"""A warm-up's progress: one bar for the whole job on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO

from kcoord.telemetry.events import plain

_FIRST = 1.0  # seconds; a shorter warm-up shows nothing
_ON_TERMINAL = 0.25  # seconds between two looks
_IN_A_LOG = 10.0  # seconds between two lines


@dataclass(frozen=True)
class Look:
    """A job's state: keys done, those of them that it compiled, and the compiles under way: ``rank 3: rms_norm 2.1 s``."""

    done: int
    compiled: int
    at: tuple[str, ...] = field(default=())


def seconds_left(seconds: Sequence[float], done: int, ranks: int) -> float:
    """The time for the keys that are left, if `ranks` share them. A warm-up does the longest keys first."""
    left = sorted(seconds)[: max(0, len(seconds) - done)]
    return max(sum(left) / max(1, ranks), left[-1]) if left else 0.0


def line_of(title: str, look: Look, seconds: Sequence[float], ranks: int) -> str:
    """One line, without a bar."""
    parts = [f"{title}: {look.done} of {len(seconds)} keys", f"{look.compiled} compiled"]
    left = seconds_left(seconds, look.done, ranks)
    parts += [f"about {left:.0f} s left"] if left >= 1 else []
    parts += ["; ".join(look.at[:2])] if look.at else []
    return plain(", ".join(parts))


@contextmanager
def shown(
    title: str, seconds: Sequence[float], ranks: int, look: Callable[[], Look], stream: TextIO | None = None
) -> Iterator[None]:
    """Show the state that `look` returns while the block runs, in a thread of its own; `look` may block, and delays nothing.

    The first look is at once, and shows nothing. `seconds` are the recorded seconds of each key. The stream is stderr by default;
    lines that cannot be written are dropped.
    """
    stream = sys.stderr if stream is None else stream
    if stream is None or getattr(stream, "closed", False) or not seconds:
        yield
        return
    over = threading.Event()
    terminal = hasattr(stream, "isatty") and stream.isatty()  # a script's own stream may have only `write`
    show = _bar if terminal else _lines
    thread = threading.Thread(target=show, args=(title, seconds, ranks, look, stream, over), daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(1.0)


def _lines(
    title: str, seconds: Sequence[float], ranks: int, look: Callable[[], Look], stream: TextIO, over: threading.Event
) -> None:
    look()
    wait = _FIRST
    while not over.wait(wait):
        wait = _IN_A_LOG
        try:
            print(f"kcoord: {line_of(title, look(), seconds, ranks)}", file=stream, flush=True)
        except (OSError, ValueError):  # the stream is closed
            return


def _bar(
    title: str, seconds: Sequence[float], ranks: int, look: Callable[[], Look], stream: TextIO, over: threading.Event
) -> None:
    look()
    if over.wait(_FIRST):
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns: list[Any] = [
        TextColumn("kcoord: {task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
    ]
    columns += [TextColumn("{task.fields[more]}", markup=False), TimeElapsedColumn()]
    console = Console(file=stream)  # sys.stdout and sys.stderr stay the job's
    try:
        with Progress(*columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False) as bar:
            task = bar.add_task(title, total=len(seconds), more="")
            while True:
                seen = look()
                left = seconds_left(seconds, seen.done, ranks)
                more = [f"{seen.compiled} compiled", *([f"{left:.0f} s left"] if left >= 1 else []), *seen.at[:1]]
                bar.update(task, completed=seen.done, more=plain(" · ".join(more)))
                if over.wait(_ON_TERMINAL):
                    return
    except (OSError, ValueError):
        return
