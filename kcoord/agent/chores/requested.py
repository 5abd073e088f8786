"""The agent's note of what its ranks ask for while they record a profile, so that another node can have it before they ask.

The store has a thread of its own here, which it may hold for ever: nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from kcoord.errors import StoreError
from kcoord.files.faults import (
    fault_of,
)
from kcoord.profiles.requested import (
    MOST_REQUESTED,
    RequestedArtifact,
    load_requested,
    requested_directory,
    save_requested,
)
from kcoord.telemetry.events import Notices, log

_EVERY = 5.0  # seconds between two files, so long as ranks go on asking
_AGAIN = 60.0  # seconds after which a disk that refused one is tried again
_SHARE = 20  # a file that took long to write is not written again for so many times as long


class Needs:
    """What is asked for under `profile`; nothing is noted without one, or without a store. Losing it harms no job.

    Not guaranteed: that what a rank finds in the local tier, and so never asks for, is noted by this agent.
    """

    def __init__(self, store: Path | None, local_dir: Path, profile: str | None, notices: Notices) -> None:
        self._directory = requested_directory(store, profile) if store is not None and profile is not None else None
        self._store, self._below, self._notices = store, f"{local_dir}{os.sep}", notices
        self._asked: dict[tuple[str, str], None] = {}
        self._known: set[RequestedArtifact] | None = None  # what was there already; read once, by the thread
        self._file: Path | None = None
        self._noted = self._written = 0
        self._io = ThreadPoolExecutor(1, "needs")
        self._writing: Future[None] | None = None
        self._next = 0.0

    def note(self, digest: str, home: str) -> None:
        """The artifact of the key `digest` was asked for, for `home`. Costs a microsecond."""
        if self._directory is None or not home.startswith(self._below) or len(self._asked) >= MOST_REQUESTED:
            return
        self._asked.setdefault((digest, home[len(self._below) :]))
        self._noted = len(self._asked)

    def pulse(self) -> None:
        """Begin to write what is new, unless that is under way or was done a moment ago."""
        now = time.monotonic()
        if self._noted > self._written and now >= self._next and (self._writing is None or self._writing.done()):
            self._begin(now)

    async def drain(self, timeout: float) -> None:
        """Write what is left, within `timeout` seconds; then no more is written."""
        deadline = time.monotonic() + timeout
        for _ in range(2):  # what is under way, and what that does not hold
            if self._writing is None:
                if self._noted <= self._written:
                    break
                self._begin(time.monotonic())
            assert self._writing is not None
            _, late = await asyncio.wait({asyncio.wrap_future(self._writing)}, timeout=deadline - time.monotonic())
            self._writing = None
            if late:
                log.info("what the job needed was not noted within %g s", timeout)
                break
        self._io.shutdown(wait=False, cancel_futures=True)

    def _begin(self, now: float) -> None:
        asked = list(self._asked)
        self._written = len(asked)
        self._next = now + _EVERY
        self._writing = self._io.submit(self._write, asked)

    def _write(self, asked: list[tuple[str, str]]) -> None:
        begun = time.monotonic()
        assert self._directory is not None
        every = _EVERY
        needs = []
        for digest, place in asked:
            try:
                needs.append(RequestedArtifact(digest, place))
            except ValueError:
                continue  # it lies where no other node would look for it
        try:
            if self._known is None:
                self._known = set(load_requested(self._directory))
            if not self._known.issuperset(needs):
                self._file = save_requested(self._directory, needs, self._file)
        except StoreError as error:
            assert self._store is not None
            self._notices.tell(f"what the job needs is not noted: {error}", about=fault_of(self._store, error))
            self._written, every = 0, _AGAIN
        self._next = time.monotonic() + max(every, _SHARE * (time.monotonic() - begun))
