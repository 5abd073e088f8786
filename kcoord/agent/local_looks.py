"""Looks into the local tier: those of one turn of the event loop together, in one thread.

A thread's turn costs more than a look at a small artifact, and ranks that start together ask for many keys at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

from kcoord.artifacts import local
from kcoord.errors import ArtifactInvalid
from kcoord.telemetry.events import Notices, tell_if_failed

_ABREAST = 2  # turns
_MOST = 64  # looks of one turn, whose answers come together


class LocalLooks:
    """Nothing is read where others may write, which is told (`local.check_owner`). `vouched` is that of `local.is_whole`."""

    def __init__(self, threads: Executor, local_dir: Path | None, notices: Notices, *, vouched: bool) -> None:
        self._threads, self._local_dir, self._notices, self._vouched = threads, local_dir, notices, vouched
        self._wanted: list[tuple[str, str, Callable[[bool], None]]] = []
        self._turns = 0
        self._closed = False

    def look(self, digest: str, home: str, found: Callable[[bool], None]) -> None:
        """Call ``found(True)``, later, if the whole artifact of `digest` is at `home`; a look that fails finds none."""
        self._wanted.append((digest, home, found))
        if len(self._wanted) == 1 and self._turns < _ABREAST:
            self._turns += 1
            asyncio.get_running_loop().call_soon(self._turn)

    def close(self) -> None:
        """Look no more. What was asked is not answered."""
        self._closed = True

    def _turn(self) -> None:
        wanted, self._wanted = self._wanted[:_MOST], self._wanted[_MOST:]
        if self._closed or not wanted:
            self._turns -= 1
            return
        homes = [(digest, Path(home)) for digest, home, _ in wanted]
        looking = asyncio.get_running_loop().run_in_executor(self._threads, self._are_here, homes)
        looking.add_done_callback(lambda done: self._looked(done, [found for _, _, found in wanted]))

    def _looked(self, done: asyncio.Future[list[bool]], told: list[Callable[[bool], None]]) -> None:
        if done.cancelled():
            return
        failed = tell_if_failed(done, "artifacts are not looked for on this node", self._notices.tell)
        for found, is_here in zip(told, [False] * len(told) if failed else done.result(), strict=True):
            found(is_here)
        self._turn()

    def _are_here(self, homes: list[tuple[str, Path]]) -> list[bool]:
        checked: set[Path] = set()
        return [self._is_here(digest, home, checked) for digest, home in homes]

    def _is_here(self, digest: str, home: Path, checked: set[Path]) -> bool:
        try:
            local.check_owner(home, self._local_dir, checked)
            return local.is_whole(home, digest, vouched=self._vouched)
        except ArtifactInvalid as error:
            self._notices.tell(str(error))
            return False
