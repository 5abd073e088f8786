"""The agent's part of a job's time line: its ranks' spans, appended to a file of this node, and copied to the store.

The node's disk has a thread of its own here and the store another one, which either may hold for ever: nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import os
import platform
import stat
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kcoord.files.faults import (
    fault_of,
    store_error,
)
from kcoord.files.naming import (
    staging_name,
)
from kcoord.protocol.identity import (
    Identity,
)
from kcoord.protocol.messages import Deliver
from kcoord.telemetry import span_files
from kcoord.telemetry.events import Notices, log
from kcoord.telemetry.job_names import directory_name
from kcoord.telemetry.spans import KEY_DIGITS, Span, checked

_MOST_JOBS = 64
_MOST_PENDING = 4 << 20  # bytes of a job that a slow disk has not taken yet
_SOON = 256 << 10  # bytes of a job that are written at once: ranks that end together deliver thousands of spans
_SHARE_EVERY = 30.0  # seconds between two copies to the store
_REST = 20  # a copy that took long is not repeated for so many times as long
_MOST_SHARED = 64  # files of a job on this node
_LATELY = 60.0  # seconds; what an agent said before a job's first report, and may be why the job is as it is
_ROOM_FOR_DROPPED = 4096  # bytes at the end of a full file


@dataclass
class _Line:
    """One job's file. `size`: bytes of it that are whole; `pending`: what follows them, in memory. `dropped`: spans that neither
    has; the file knows of `told` others. `heard`: how much of what the agent said it has.
    """

    job: str
    pending: bytearray
    path: Path
    size: int = 0
    dropped: int = 0
    told: int = 0
    unshared: bool = False
    heard: int = 0


class Timelines:
    """What this agent's ranks did. Losing any of it harms no job: no method raises for a disk's or a client's sake."""

    def __init__(self, store: Path | None, local_dir: Path, agent: str, notices: Notices) -> None:
        self._store, self._local_dir, self._agent, self._notices = store, local_dir, agent, notices
        self._lines: dict[str, _Line] = {}
        self._opened = 0
        self._io, self._store_io = ThreadPoolExecutor(1, "timelines"), ThreadPoolExecutor(1, "timelines-store")
        self._saving: asyncio.Task[None] | None = None
        self._sharing: asyncio.Task[None] | None = None
        self._share_at = 0.0  # at once: a node that vanishes then leaves a word of itself
        self._began, self._listened = time.time(), 0
        self._said: list[span_files.Said] = []
        self._shared: dict[Path, int] = {}  # file → the bytes of it that the store has
        self._io.submit(span_files.forget_old, local_dir)

    def add(self, who: Identity, message: Deliver) -> list[str]:
        """Keep the spans of a delivery; what is no span is left out, and counted. Returns their keys."""
        spans, refused = checked(message.spans)
        self._append(who, spans, message.dropped + refused)
        return [span.key for span in spans]

    def lost(self, who: Identity, digest: str, name: str, seconds: float) -> None:
        """The process `who` ended while it compiled `name`, which is ``backend:kernel``, for so long."""
        backend, _, kernel = name.partition(":")
        begin = time.time() - seconds
        wire = ["compile", "lost", backend, kernel, digest[:KEY_DIGITS], begin, seconds, 0.0, False, ""]
        self._append(who, *checked([wire]))

    def _append(self, who: Identity, spans: list[Span], dropped: int) -> None:
        if not spans and not dropped:
            return
        line = self._lines.get(who.job)
        if line is None:
            if len(self._lines) >= _MOST_JOBS and not self._close_one():
                self._notices.tell(f"some jobs leave no time line: {_MOST_JOBS} others have one under way")
                return
            line = self._lines[who.job] = self._open(who.job)
        record = span_files.report(span_files.process_of(who.pid, who.rank), spans)
        room = span_files.LARGEST_FILE - _ROOM_FOR_DROPPED - line.size
        if len(line.pending) + len(record) > min(room, _MOST_PENDING):
            self._notices.tell(
                "a time line is full, or its disk is slow: what follows is only counted", about=f"full {who.job}"
            )
            dropped += len(spans)
        elif spans:
            line.pending += record
            if len(line.pending) >= _SOON:
                self._save_soon()
        line.dropped = min(line.dropped + dropped, span_files.MOST)

    def _open(self, job: str) -> _Line:
        """A file of its own, also for a job that had one before, which is not opened again."""
        self._opened += 1
        directory = span_files.roots(None, self._local_dir)[0] / directory_name(job)
        path = directory / f"{self._agent}-{self._opened}{span_files.SUFFIX}"
        self._listen()
        first = self._saying(self._began, f"agent {self._agent} began", "begins").record()
        lately = [said for said in self._said if said.when < time.time() - _LATELY]
        return _Line(job, bytearray(span_files.head(platform.node()) + first), path, heard=len(lately))

    def _saying(self, when: float, text: str, what: span_files.Moment = "told") -> span_files.Said:
        return span_files.Said(when, platform.node(), text, what)

    def _listen(self) -> None:
        """Pass on to each job's file what the agent has told since the last time."""
        lines, self._listened = self._notices.since(self._listened)
        self._said += [self._saying(time.time(), line) for line in lines]
        for line in self._lines.values():
            self._append_said(line, self._said[line.heard :])
            line.heard = len(self._said)

    def _append_said(self, line: _Line, said: list[span_files.Said]) -> None:
        for record in (each.record() for each in said):
            if line.size + len(line.pending) + len(record) <= span_files.LARGEST_FILE - _ROOM_FOR_DROPPED:
                line.pending += record

    def _close_one(self) -> bool:
        """Forget the oldest job of which all is written, and copied. False: there is none."""
        for job, line in self._lines.items():
            if not line.pending and not line.dropped and not (line.unshared and self._store is not None):
                self._shared.pop(line.path, None)
                del self._lines[job]
                return True
        return False

    def pulse(self) -> None:
        """Begin to write what is pending, and to copy it to the store, unless that is under way or was done a moment ago."""
        self._listen()
        for line in self._lines.values():
            if line.dropped >= max(1, line.told):  # a few times a job, however long spans are dropped
                self._tell_dropped(line)
        if any(line.pending for line in self._lines.values()):
            self._save_soon()
        due = time.monotonic() >= self._share_at and any(line.unshared for line in self._lines.values())
        if due and self._store is not None and (self._sharing is None or self._sharing.done()):
            self._sharing = self._begin(self._share())

    def _save_soon(self) -> None:
        if self._saving is None or self._saving.done():
            self._saving = self._begin(self._save())

    async def drain(self, timeout: float) -> None:
        """Write and copy what is left, within `timeout` seconds; then no more is written."""
        rest = self._begin(self._finish())
        _, late = await asyncio.wait({rest}, timeout=timeout)
        if late:
            rest.cancel()
            log.info("the end of the time line was not written within %g s", timeout)
        self._io.shutdown(wait=False, cancel_futures=True)
        self._store_io.shutdown(wait=False, cancel_futures=True)

    async def _finish(self) -> None:
        if self._saving is not None:
            await asyncio.wait({self._saving})
        self._listen()
        for line in self._lines.values():
            self._tell_dropped(line)
            self._append_said(line, [self._saying(time.time(), f"agent {self._agent} was told to end", "ends")])
        await self._save()
        if self._sharing is not None:
            await asyncio.wait({self._sharing})
        await self._share()

    def _begin(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._notices.tell(f"an error in the agent, please report it: {type(error).__name__}: {error}")
            log.error("a time line was not saved", exc_info=error)

    async def _save(self) -> None:
        for line in list(self._lines.values()):
            if not line.pending:
                continue
            pending = bytes(line.pending)
            size = await self._in(self._io, functools.partial(self._write, line.path, line.size, pending))
            if size is not None:
                line.size, line.unshared = size, True
                del line.pending[: len(pending)]

    def _write(self, path: Path, size: int, pending: bytes) -> int | None:
        """Make `pending` follow the first `size` bytes of the file; how long it is then. None: it cannot be written now."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)
            with path.open("r+b") as file:
                if file.seek(0, os.SEEK_END) < size:  # somebody cleans this directory: what is left begins anew
                    size, pending = 0, span_files.head(platform.node()) + pending
                file.truncate(size)  # what a full disk cut off goes
                file.seek(size)
                file.write(pending)
        except OSError as error:
            self._notices.tell(f"the time line is not kept: {store_error(error, path.parent)}", about="time line")
            return None
        return size + len(pending)

    async def _share(self) -> None:
        begun = time.monotonic()
        for line in list(self._lines.values()):
            if line.unshared and self._store is not None:
                line.unshared = False
                if not await self._in(self._store_io, functools.partial(self._copy, line.path)):
                    line.unshared = True
        now = time.monotonic()
        self._share_at = now + max(_SHARE_EVERY, _REST * (now - begun))

    def _tell_dropped(self, line: _Line) -> None:
        if line.dropped and line.size + len(line.pending) < span_files.LARGEST_FILE - 100:
            line.pending += span_files.report(span_files.process_of(0, None), [], line.dropped)
            line.told, line.dropped = line.told + line.dropped, 0

    def _copy(self, mine: Path) -> bool:
        """Copy this node's files of a job: `mine`, those of an agent before us, and of processes without one. False: not now."""
        assert self._store is not None
        there = span_files.roots(self._store, self._local_dir)[1] / mine.parent.name
        try:
            others = sorted(mine.parent.glob(f"*{span_files.SUFFIX}"))
            for path in [mine, *(p for p in others if p != mine)][:_MOST_SHARED]:
                self._copy_one(path, there)
        except OSError as caught:
            error = store_error(caught, there)
            self._notices.tell(f"the time line stays on this node: {error}", about=fault_of(self._store, error))
            return False
        return True

    def _copy_one(self, path: Path, there: Path) -> None:
        """Raises OSError."""
        assert self._store is not None
        try:
            here = path.lstat()
        except FileNotFoundError:  # somebody cleans this directory
            return
        if not stat.S_ISREG(here.st_mode) or not self._shared.get(path, 0) < here.st_size <= span_files.LARGEST_FILE:
            return
        there.mkdir(parents=True, exist_ok=True)
        if there.is_symlink():  # whoever may write to the store would choose where we write
            raise OSError(errno.ELOOP, "it is a symbolic link, which is not followed", str(there))
        if _size(there / path.name) != here.st_size:
            content = path.read_bytes()
            fresh = self._store / "v1" / "staging" / f"{staging_name()}{span_files.SUFFIX}"
            try:
                fresh.write_bytes(content)
                fresh.replace(there / path.name)
            except OSError:
                with suppress(OSError):
                    fresh.unlink()
                raise
        self._shared[path] = here.st_size

    async def _in(self, pool: ThreadPoolExecutor, work: Callable[[], Any]) -> Any:
        found: Awaitable[Any] = asyncio.get_running_loop().run_in_executor(pool, work)
        return await found


def _size(path: Path) -> int:
    """Bytes; -1 if there is no such file."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return -1
