"""The directories of this node from which a process loads artifacts: those to which no other user may write."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path

from kcoord.errors import StoreError
from kcoord.files.private import check_tier, make_tier
from kcoord.interruption import let_through
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices


class OwnTiers:
    """Looks at each directory once in a process, and tells of one that others may write to."""

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._settings, self._notices = settings, notices
        self._below = f"{settings.local_dir}{os.sep}"
        self._usable: bool | None = None
        self._private: dict[str, bool] = {}
        self._taken: dict[str, bool] = {}

    @property
    def usable(self) -> bool:
        """False if kcoord is off, another user may write to the local directory, or no library can be mapped from there."""
        if self._usable is None:
            told = "kernels are compiled without coordination"
            make = functools.partial(make_tier, self._settings.local_dir)
            self._usable = not self._settings.disable and self._is_good(make, "KCOORD_LOCAL_DIR=", told)
        return self._usable

    def is_private(self, home: str | Path) -> bool:
        """False if kcoord is off, or another user may write where `home` lies: nothing is loaded from there, or published there.

        After the first look at a directory it costs no system call.
        """
        tier = os.path.dirname(home)  # noqa: PTH120 - on every kernel's way
        private = self._private.get(tier)
        if private is None:
            told = "artifacts are not shared there"
            private = self._private[tier] = self.usable and self._is_good(lambda: check_tier(Path(tier)), "", told)
        return private

    def takes(self, home: Path) -> bool:
        """False if this user cannot publish around `home`, a place outside the local directory: it is root's, or read-only.

        So is one whose directory for staging others may write to, which is told. Looks once at each directory.
        """
        tier = os.path.dirname(home)  # noqa: PTH120
        taken = self._taken.get(tier)
        if taken is None:
            taken = self._taken[tier] = f"{tier}{os.sep}".startswith(self._below) or self._may_stage(Path(tier))
        return taken

    def _may_stage(self, tier: Path) -> bool:
        staging = tier / ".kcoord" / "staging"
        existing = next(path for path in (staging, *staging.parents) if os.path.exists(path))  # noqa: PTH110 - EACCES
        told = "kernels are compiled into the local directory"
        return os.access(existing, os.W_OK | os.X_OK) and self._is_good(lambda: check_tier(staging), "", told)

    def _is_good(self, check: Callable[[], object], name: str, told: str) -> bool:
        """False if `check` raises `StoreError`, which is told."""
        try:
            check()
        except StoreError as error:
            let_through(error)
            self._notices.tell(f"{name}{error}; {told}")
            return False
        return True
