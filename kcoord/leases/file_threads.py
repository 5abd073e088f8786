"""Threads for lease files: a command is bounded, and refused at once while too many threads hang."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from kcoord.errors import LeaseUnavailable
from kcoord.files.bounded_threads import BoundedThreads
from kcoord.files.faults import store_error
from kcoord.leases.base import within

T = TypeVar("T")

COMMAND_TIMEOUT = 4.0  # seconds; as long as a command of Redis may take
_THREADS = 8
_MOST_STUCK = 4


class FileThreads(BoundedThreads):
    """A stuck thread keeps its place: its late result counts, since a lease that it takes has to be given back."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, "lease-files", abreast=_THREADS, patience=COMMAND_TIMEOUT, gives_up=False)

    def check(self) -> None:
        """Raises `LeaseUnavailable` while too many threads hang: then one more would hang as well."""
        if self.stuck >= _MOST_STUCK:
            raise LeaseUnavailable(f"{self.root}: it has not answered for {COMMAND_TIMEOUT:g} s: look at its server")

    async def bounded(self, command: Awaitable[T]) -> T:
        """Raises `LeaseUnavailable`, which ends with the remedy, for an OSError and after `COMMAND_TIMEOUT`."""
        try:
            return await within(COMMAND_TIMEOUT, command)
        except asyncio.TimeoutError:
            raise LeaseUnavailable(f"{self.root}: no answer in {COMMAND_TIMEOUT:g} s: look at its server") from None
        except OSError as error:
            raise LeaseUnavailable(str(store_error(error, self.root))) from error
