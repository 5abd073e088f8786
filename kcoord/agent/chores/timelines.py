"""Figures and time lines of jobs: ranks' spans are added up, appended to a file of this node, and copied to the store."""

from __future__ import annotations

import functools
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from kcoord.agent.chores.chore import REST, Chore, DiskThread
from kcoord.agent.connections import Connection
from kcoord.errors import StoreError
from kcoord.files.atomic import LAYOUT, replace_file
from kcoord.files.faults import fault_of, store_error
from kcoord.files.private import make_own
from kcoord.files.rename import make_below
from kcoord.latest import Latest
from kcoord.protocol import messages
from kcoord.protocol.identity import Identity
from kcoord.telemetry import span_files
from kcoord.telemetry.events import Notices
from kcoord.telemetry.figures import Figures, Sums
from kcoord.telemetry.spans import KEY_DIGITS, Span, checked, directory_name

_MOST_JOBS = 64
_SHARE_EVERY = 30.0  # seconds between two copies to the store
_ROOM_FOR_END = 4096  # bytes at the end of a full file


@dataclass
class _Line:
    """One job's file. `size`: bytes of it that are whole; `pending`: those that follow them, in memory. `dropped`: spans that are
    in neither, and are not counted there yet.
    """

    pending: bytearray
    path: Path
    size: int = 0
    dropped: int = 0
    unshared: bool = False

    @property
    def room(self) -> int:
        return span_files.LARGEST_FILE - _ROOM_FOR_END - self.size - len(self.pending)


class Timelines:
    """The spans of this agent's ranks. A loss harms no job: no method raises for a disk's or a client's sake.

    Not guaranteed of an agent that is killed: its last half minute in the store, and a count of spans that a full file lacks.
    """

    def __init__(self, store: Path | None, local_dir: Path, agent: str, notices: Notices) -> None:
        self._store, self._local_dir, self._agent, self._notices = store, local_dir, agent, notices
        self._lines: Latest[str, _Line] = Latest(_MOST_JOBS)
        self._figures: Latest[str, Figures] = Latest(_MOST_JOBS)
        self._opened = 0
        self._thread, self._store_thread = DiskThread("timelines"), DiskThread("timelines-store")
        self._saving = Chore(
            "time lines", self._thread, self._save, notices, wanted=self._has_more, last=self._save_end
        )
        self._sharing = Chore(  # the first run at once, for nodes that vanish soon
            "time lines in the store", self._store_thread, self._share, notices, every=_SHARE_EVERY, rest=REST,
            wanted=self._has_unshared, last=self._share_end,
        )  # fmt: skip
        self.chores = [self._saving, self._sharing]

    def add(self, who: Identity, message: messages.Deliver) -> list[Span]:
        """Keep the spans of a delivery, and return them. Malformed ones are left out, and counted.

        Of a pool's worker its compiles are kept: no rank loaded what it loaded, nor waited for it.
        """
        spans, refused = checked(message.spans)
        if who.pool:
            spans = [span for span in spans if span.kind == "compile"]
        self._append(who, spans, message.dropped + refused)
        return spans

    def stats(self, _: Connection, __: int, message: messages.Stats) -> messages.Facts:
        """The figures of a job on this node, by default of the one that delivered last. A job without spans has the name None."""
        job = next(reversed(self._figures), None) if message.job is None else message.job
        found = self._figures.get(job) if job is not None else None
        return messages.Facts({"job": None if found is None else job, "figures": (found or Figures()).read()})

    def latest(self, most: int) -> dict[str, Sums]:
        """By job, its figures on this node; of the jobs that delivered last."""
        return {job: self._figures[job].read() for job in list(self._figures)[-most:]}

    def last_ready(self, job: str) -> float:
        """The moment of the last kernel of `job` on this node, in Unix seconds; 0 if there was none."""
        found = self._figures.get(job)
        return 0.0 if found is None else found.ready

    def lost(self, who: Identity, digest: str, name: str, seconds: float) -> None:
        """The process `who` ended while it compiled `name`, which is ``backend:kernel``, for so long."""
        backend, _, kernel = name.partition(":")
        begin = time.time() - seconds
        span = Span("compile", "lost", backend, kernel, digest[:KEY_DIGITS], begin, seconds)
        self._append(who, *checked([span.to_wire()]))

    def _append(self, who: Identity, spans: list[Span], dropped: int) -> None:
        if not spans and not dropped:
            return
        sums = self._figures[who.job] = self._figures.get(who.job) or Figures()
        sums.dropped += dropped
        process = span_files.process_of(who.pid, who.rank, pool=who.pool)
        for span in spans:
            sums.add(span, process)
        line = self._lines[who.job] = self._lines.get(who.job) or self._open(who.job)
        line.dropped = min(line.dropped + dropped, span_files.LARGEST_NUMBER)
        if not spans:
            return
        record = span_files.delivery(process, spans, line.dropped)
        if len(record) <= line.room:
            line.pending += record
            line.dropped = 0
        else:
            self._notices.tell(
                "a time line is full, or its disk is slow: later spans are only counted", about=f"full {who.job}"
            )
            line.dropped += len(spans)

    def _open(self, job: str) -> _Line:
        """A file of its own, also for a job that had one before, which is not opened again."""
        self._opened += 1
        directory = span_files.roots(None, self._local_dir)[0] / directory_name(job)
        path = directory / f"{self._agent}-{self._opened}{span_files.SUFFIX}"
        return _Line(bytearray(span_files.header(platform.node())), path)

    def _has_more(self) -> bool:
        return any(line.pending for line in self._lines.values())

    def _has_unshared(self) -> bool:
        return self._store is not None and any(line.unshared for line in self._lines.values())

    async def _save_end(self) -> None:
        for line in self._lines.values():
            if line.dropped:
                line.pending += span_files.delivery(span_files.process_of(0, None), [], line.dropped)
        await self._save()

    async def _share_end(self) -> None:
        await self._saving.ended.wait()
        await self._share()

    async def _save(self) -> None:
        for line in list(self._lines.values()):
            if not line.pending:
                continue
            pending = bytes(line.pending)
            size = await self._thread.run(functools.partial(self._write, line.path, line.size, pending))
            if size is not None:
                line.size, line.unshared = size, True
                del line.pending[: len(pending)]

    def _write(self, path: Path, size: int, pending: bytes) -> int | None:
        """Put `pending` behind the first `size` bytes of the file; returns its new size. None: it cannot be written now."""
        try:
            make_own(path.parent)
            path.touch(0o600)
            with path.open("r+b") as file:
                if file.seek(0, os.SEEK_END) < size:  # somebody cleans this directory: the file begins anew
                    size, pending = 0, span_files.header(platform.node()) + pending
                file.truncate(size)  # a record that a full disk cut off goes
                file.seek(size)
                file.write(pending)
        except (OSError, StoreError) as error:
            why = error if isinstance(error, StoreError) else store_error(error, path.parent)
            self._notices.tell(f"the time line is not kept: {why}", about="time line")
            return None
        return size + len(pending)

    async def _share(self) -> None:
        for line in list(self._lines.values()):
            if line.unshared and self._store is not None:
                line.unshared = False  # bytes that are saved meanwhile are for the next copy
                if not await self._store_thread.run(functools.partial(self._copy, self._store, line.path)):
                    line.unshared = True

    def _copy(self, store: Path, path: Path) -> bool:
        """Copy a file to the store. False: not now."""
        there = span_files.roots(store, self._local_dir)[1] / path.parent.name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return True  # somebody cleans this node's directory
        try:
            if not there.is_dir():
                make_below(there)
            replace_file(there / path.name, content, store / LAYOUT / "staging", store)
        except OSError as caught:
            if not store.is_dir():  # which the agent tells
                return False
            error = store_error(caught, there)
            self._notices.tell(f"the time line stays on this node: {error}", about=fault_of(store, error))
            return False
        return True
