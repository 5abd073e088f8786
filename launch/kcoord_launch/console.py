"""Lines of a launcher for its user."""

from __future__ import annotations

import sys
from contextlib import suppress

from kcoord.telemetry.events import plain


def say(line: str) -> None:
    """Print one line on stderr, if it is still open: a closed pipe is no reason for a job to fail."""
    if sys.stderr is not None:
        with suppress(OSError, ValueError):
            print(f"kcoord: {plain(line)}", file=sys.stderr, flush=True)
