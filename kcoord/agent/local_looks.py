"""Looks into the local tier: those of one turn of the event loop together, in one thread.

A thread's turn costs more than a look at a small artifact, and ranks that start together ask for many keys at once. A look that
fails, has no thread, or takes seconds finds nothing: the claim goes on to the lease.

Ranks may have a directory each (``TRITON_CACHE_DIR=…/rank3``): an artifact that is not where its claimant wants it is looked for
where it last landed on this node.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from kcoord.artifacts import local
from kcoord.errors import ArtifactInvalid
from kcoord.latest import Latest
from kcoord.telemetry.events import Notices, tell_bug, tell_if_failed

_ABREAST = 3  # turns: a disk that hangs leaves one thread of the local tier's
_MOST = 64  # looks of one turn, whose answers come together
_PATIENCE = 5.0  # seconds of a turn

_MOST_LANDED = 20_000  # keys whose place is remembered

_Look = tuple[str, list[str], Callable[[str], None]]
"""A key, the homes at which to look, and what to call with the first one that holds its artifact."""


class LocalLooks:
    """Nothing is read where others may write, which is told (`local.check_owner`). `only_landed`: only homes that this agent has
    filled are looked at. Ranks that require no signatures name homes, too, with artifacts of other agents in them.
    """

    def __init__(self, threads: Executor, notices: Notices, *, only_landed: bool) -> None:
        self._threads, self._notices, self._only_landed = threads, notices, only_landed
        self._wanted: list[_Look] = []
        self._landed: Latest[str, str] = Latest(_MOST_LANDED)  # key → home
        self._due = False  # `_begin` is
        self._turns: set[asyncio.Task[None]] = set()
        self._overdue = 0  # turns whose thread has not come back in time
        self._closed = False

    def landed(self, digest: str, home: Path) -> None:
        """The artifact of `digest` is at `home`. Not guaranteed: that it stays there, which the next look finds out."""
        self._landed[digest] = str(home)

    def has_landed(self, digest: str, home: Path) -> bool:
        return self._landed.get(digest) == str(home)

    def look(self, digest: str, home: str, found: Callable[[str], None]) -> None:
        """Call ``found(place)``, later, with `home` if the whole artifact of `digest` is there, else with another home of this
        node that holds it, else with an empty text.
        """
        landed = self._landed.pop(digest, None)  # forgotten, unless it is found
        named = [] if self._only_landed else [home]
        homes = list(dict.fromkeys((*named, *([landed] if landed else []))))
        self._wanted.append((digest, homes, found))
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._begin)

    def close(self) -> None:
        """Look no more. What was asked is not answered."""
        self._closed = True
        self._wanted.clear()

    def _begin(self) -> None:
        self._due = False
        while self._wanted and len(self._turns) < _ABREAST:
            wanted, self._wanted = self._wanted[:_MOST], self._wanted[_MOST:]
            turn = asyncio.create_task(self._turn(wanted))
            self._turns.add(turn)
            turn.add_done_callback(self._ended)
        if self._overdue >= _ABREAST:  # no thread will look: a disk hangs
            wanted, self._wanted = self._wanted, []
            self._answer(wanted, [])

    def _ended(self, turn: asyncio.Task[None]) -> None:
        self._turns.discard(turn)
        tell_if_failed(turn, "a look at this node's artifacts failed", self._notices.tell)
        self._begin()

    async def _turn(self, wanted: list[_Look]) -> None:
        """Lasts for as long as its thread does."""
        here: list[str] = []
        looking: asyncio.Future[None] | None = None
        try:
            looking = asyncio.get_running_loop().run_in_executor(self._threads, self._look_at, wanted, here)
            await asyncio.wait({looking}, timeout=_PATIENCE)
        finally:
            self._answer(wanted, here[:])  # also if this user may have no more threads
        if not looking.done():
            self._overdue += 1
            self._begin()
            try:
                await asyncio.wait({looking})
            finally:
                self._overdue -= 1
        tell_if_failed(looking, "artifacts are not looked for on this node", self._notices.tell)

    def _answer(self, wanted: list[_Look], here: list[str]) -> None:
        for number, (digest, _, found) in enumerate(wanted):
            if self._closed:
                return
            place = here[number] if number < len(here) else ""
            if place:
                self._landed[digest] = place
            try:
                found(place)
            except Exception as error:  # noqa: BLE001 - the others of the turn are to be answered
                tell_bug(error, "a claim is not answered", self._notices.tell)

    def _look_at(self, wanted: list[_Look], here: list[str]) -> None:
        checked: set[Path] = set()
        for digest, homes, _ in wanted:
            here.append(next((home for home in homes if self._is_here(digest, Path(home), checked)), ""))

    def _is_here(self, digest: str, home: Path, checked: set[Path]) -> bool:
        try:
            local.check_owner(home, checked)
            return local.is_whole(home, digest)
        except ArtifactInvalid as error:
            self._notices.tell(str(error))
            return False
