"""Records of the artifacts that ranks ask for under a profile, in the store: another node can fetch them ahead."""

from __future__ import annotations

import os
from pathlib import Path

from kcoord.agent.chores.chore import REST, Chore, Lane
from kcoord.artifacts.store_root import StoreRoot
from kcoord.errors import StoreError
from kcoord.files.faults import fault_of
from kcoord.profiles.requested import (
    MOST_REQUESTED,
    RequestedArtifact,
    load_requested,
    requested_directory,
    save_requested,
)
from kcoord.telemetry.events import Notices

_EVERY = 5.0  # seconds between two files, so long as ranks go on asking
_AGAIN = 60.0  # seconds after which a disk that refused one is tried again


class RequestedRecorder:
    """Records the artifacts that are asked for under `profile`; none without a profile or a store. A loss harms no job.

    Not guaranteed: that an artifact is recorded which a rank finds in the local tier, and so never asks for.
    """

    def __init__(self, store: Path | None, local_dir: Path, profile: str | None, notices: Notices) -> None:
        self._directory = requested_directory(store, profile) if store is not None and profile is not None else None
        self._store, self._below, self._notices = store, f"{local_dir}{os.sep}", notices
        self._asked: dict[tuple[str, str], None] = {}  # digest and place, in order
        self._in_store: set[RequestedArtifact] | None = None  # from earlier jobs; read once
        self._file: Path | None = None
        self._recorded = 0  # so many of `_asked` are in the store
        self._lane = Lane("requested")
        self.chores = [
            Chore("requested artifacts", self._lane, self._record, notices, every=_EVERY, rest=REST,
                  wanted=self._has_more, last=self._record_rest),
        ]  # fmt: skip

    def note(self, digest: str, home: str) -> None:
        """The artifact of the key `digest` was asked for, for `home`. Costs a microsecond."""
        if self._directory is not None and home.startswith(self._below) and len(self._asked) < MOST_REQUESTED:
            self._asked.setdefault((digest, home[len(self._below) :]))

    def _has_more(self) -> bool:
        return len(self._asked) > self._recorded

    async def _record(self) -> float | None:
        asked = list(self._asked)
        self._recorded = len(asked)
        try:
            await self._lane.run(lambda: self._write(asked))
        except StoreError as error:
            assert self._store is not None
            self._notices.tell(
                f"the list of the job's artifacts is not written: {error}", about=fault_of(self._store, error)
            )
            self._recorded = 0
            return _AGAIN
        return None

    async def _record_rest(self) -> None:
        if self._has_more():
            await self._record()

    def _write(self, asked: list[tuple[str, str]]) -> None:
        """Raises `StoreError`."""
        assert self._directory is not None
        assert self._store is not None
        needs = []
        for digest, place in asked:
            try:
                needs.append(RequestedArtifact(digest, place))
            except ValueError:
                continue  # it lies where no other node would look for it
        if self._in_store is not None and self._in_store.issuperset(needs):
            return
        known = set(load_requested(self._directory)) if self._in_store is None else self._in_store
        if not known.issuperset(needs):
            StoreRoot(self._store).find()
            self._file = save_requested(self._directory, needs, self._file)
        self._in_store = known
