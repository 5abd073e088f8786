"""Waits of a test: for a condition, bounded, and never for luck."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

SOON = 20.0  # seconds: the bound of every wait for something that is to happen at once
# seconds between two looks: a look may cost as much as the work that it waits for
_FIRST_LOOK, _LAST_LOOK = 0.005, 0.05


def eventually(condition: Callable[[], object], timeout: float = SOON, what: str = "") -> float:
    """Look until `condition` holds; the seconds that it took. Raises AssertionError after `timeout` seconds."""
    start, pause = time.monotonic(), _FIRST_LOOK
    while not condition():
        assert time.monotonic() < start + timeout, f"after {timeout} s it still did not happen: {what or condition}"
        time.sleep(pause)
        pause = min(1.5 * pause, _LAST_LOOK)
    return time.monotonic() - start


class Process(Protocol):
    """A child, or a process that was forked for the test."""

    pid: int

    def send_signal(self, number: int, /) -> None: ...


def pause(process: Process) -> None:
    """SIGSTOP, and wait until it has stopped: until then it may answer one more request."""
    process.send_signal(signal.SIGSTOP)
    state = Path(f"/proc/{process.pid}/stat")
    eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", what="it has stopped")
