"""The directories of this node from which a process loads artifacts: those to which no other user may write."""

from __future__ import annotations

import os
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
        self._trusted: dict[str, bool] = {}

    @property
    def usable(self) -> bool:
        """False if kcoord is off, another user may write to the local directory, or no library can be mapped from there."""
        if self._usable is None:
            self._usable = not self._settings.disable and self._owns_local_dir()
        return self._usable

    def trusts(self, home: str | Path) -> bool:
        """False if kcoord is off, or another user may write where `home` lies: nothing is loaded from there, or published there.

        After the first look at a directory it costs no system call.
        """
        place = os.fspath(home)
        end = place.find(os.sep, len(self._below)) if place.startswith(self._below) else place.rfind(os.sep)
        tier = place[:end]
        trusted = self._trusted.get(tier)
        if trusted is None:
            trusted = self._trusted[tier] = self.usable and self._owns(tier)
        return trusted

    def _owns_local_dir(self) -> bool:
        try:
            make_tier(self._settings.local_dir)
        except StoreError as error:
            let_through(error)
            self._notices.tell(f"KCOORD_LOCAL_DIR={error}; kernels are compiled without coordination")
            return False
        return True

    def _owns(self, tier: str) -> bool:
        try:
            check_tier(Path(tier), self._settings.local_dir)
        except StoreError as error:
            let_through(error)
            self._notices.tell(f"{error}; artifacts are not shared there")
            return False
        return True
