"""A warm-up's progress: a line now and then."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TextIO

from kcoord.telemetry.events import plain


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
    """The line that tells of `look`, without control characters."""
    parts = [f"{title}: {look.done} of {len(seconds)} keys", f"{look.compiled} compiled"]
    left = seconds_left(seconds, look.done, ranks)
    parts += [f"about {left:.0f} s left"] if left >= 1 else []
    parts += ["; ".join(look.at[:2])] if look.at else []
    return plain(", ".join(parts))


@contextmanager
def shown(
    title: str,
    seconds: Sequence[float],
    ranks: int,
    look: Callable[[], Look],
    stream: TextIO | None = None,
    *,
    first: float = 1.0,
    every: float = 10.0,
) -> Iterator[None]:
    """Print the state that `look` returns, from a thread, while the block runs. A blocked `look` delays the end by 1 s at most.

    A line after `first` seconds, and then `every` so many. `seconds` are the recorded seconds of each key. The stream is stderr
    by default; lines that cannot be written are dropped.
    """
    stream = sys.stderr if stream is None else stream
    if stream is None or getattr(stream, "closed", False) or not seconds:
        yield
        return
    over = threading.Event()

    def show() -> None:
        wait = first
        with suppress(OSError, ValueError):  # the stream is closed
            while not over.wait(wait):
                print(f"kcoord: {line_of(title, look(), seconds, ranks)}", file=stream, flush=True)
                wait = every

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(1.0)
