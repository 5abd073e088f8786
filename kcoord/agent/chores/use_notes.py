"""Notes in the store of the artifacts that this node uses, so that retention spares them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path

from kcoord.agent.chores.chore import Chore, Lane
from kcoord.errors import StoreError
from kcoord.files.faults import fault_of
from kcoord.files.sweep import lives
from kcoord.retention.uses import MOST_USES, note_uses, prefix_of
from kcoord.telemetry.events import Notices

FIRST, EVERY = 1800.0, 86400.0  # seconds
_PROCESSES = 64  # of which it is not looked at once whether they live


class UseNotes:
    """Notes uses once a day and when the agent ends. An artifact is in use as long as a process lives that has ever used it, and
    may have it in memory. No method raises for a disk's sake.
    """

    def __init__(self, store: Path | None, notices: Notices) -> None:
        self._store, self._notices = store, notices
        self._unnoted: dict[bytes, None] = {}  # prefixes of digests, in order
        self._by_process: dict[int, set[bytes]] = {}  # all prefixes that each process has used
        self._most_processes = _PROCESSES
        self._refused: list[bytes] = []  # by the disk, at the last attempt
        self._lane = Lane("use-notes")
        chore = Chore(
            "notes of use", self._lane, self._note_all, notices, first=FIRST, every=EVERY, last=self._note_rest
        )  # fmt: skip
        self.chores = [chore] if store is not None else []

    def used(self, digests: Iterable[str], pid: int) -> None:
        """The process `pid` of this node (0: unknown) asked for these, or loaded them; 16 digits of each are enough.

        A text that is no digest is ignored.
        """
        if self._store is None:
            return
        if pid not in self._by_process and len(self._by_process) >= self._most_processes:
            self._forget_ended_processes()
            self._most_processes = 2 * len(self._by_process) + _PROCESSES
        of_process = self._by_process.setdefault(pid, set())
        for digest in digests:
            with suppress(ValueError):
                prefix = prefix_of(digest)
                if len(self._unnoted) < MOST_USES:
                    self._unnoted.setdefault(prefix)
                if len(of_process) < MOST_USES:
                    of_process.add(prefix)

    def _forget_ended_processes(self) -> None:
        """Without this, an agent that serves one job after the other would call every artifact used for ever."""
        self._by_process = {pid: used for pid, used in self._by_process.items() if pid == 0 or lives(pid)}

    async def _note_all(self) -> None:
        self._forget_ended_processes()
        await self._note(chain(self._unnoted, self._refused, *self._by_process.values()))

    async def _note_rest(self) -> None:
        if self._unnoted or self._refused:
            await self._note(chain(self._unnoted, self._refused))

    async def _note(self, prefixes: Iterable[bytes]) -> None:
        store, chosen = self._store, list(dict.fromkeys(prefixes))
        assert store is not None
        self._unnoted = {}
        try:
            await self._lane.run(lambda: note_uses(store, chosen))
            self._refused = []
        except StoreError as error:
            self._refused = chosen
            self._notices.tell(f"the notes of use are not written: {error}", about=fault_of(store, error))
