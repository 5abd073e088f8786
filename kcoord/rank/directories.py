"""The directories that one process loads from and compiles in; and those that it throws away: a tuner (Helion) compiles each of
its candidates in a temporary directory, and uses one of them.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kcoord.artifacts import local
from kcoord.default_dir import private_places, takes_libraries
from kcoord.errors import StoreError
from kcoord.files.faults import store_error
from kcoord.files.private import check_tier, make_tier
from kcoord.interruption import let_through
from kcoord.latest import Latest
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices

_LEAST_ROOM = 4 << 20  # bytes that a disk must have free for a compile to begin there
_MOST_MADE = 1000
_made: Latest[str, None] = Latest(_MOST_MADE)  # temporary directories of this process


@contextmanager
def directory_held(directory: Path) -> Iterator[Callable[[], bool]]:
    """Yields ``is_lost()``: true if `directory` has been removed since, also if there is another one of its name."""
    held = None
    with suppress(OSError):  # it is gone, or this process has no more descriptors
        held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)  # no other gets its number meanwhile

    def is_lost() -> bool:
        try:
            found = directory.lstat()
        except OSError:
            return True
        return held is not None and not os.path.samestat(os.fstat(held), found)

    try:
        yield is_lost
    finally:
        if held is not None:
            os.close(held)


class Directories:
    """The directories of this node from which a process loads artifacts, and those in which it compiles.

    It looks at each once, and tells of one that others may write to: then it compiles in a private directory, which lasts as long
    as this process.
    """

    def __init__(self, settings: Settings, notices: Notices) -> None:
        self._notices, self._disabled, self._local_dir = notices, settings.disable, settings.local_dir
        self._usable: bool | None = None
        self._is_private: dict[str, bool] = {}
        self._takes: dict[str, bool] = {}
        self._own: list[Path] = []  # private directories

    @property
    def usable(self) -> bool:
        """False if kcoord is off, another user may write to the local directory, or no library can be mapped from there."""
        if self._usable is None:
            told = "kernels are compiled without coordination"
            make = functools.partial(make_tier, self._local_dir)
            self._usable = not self._disabled and self._is_good(make, "KCOORD_LOCAL_DIR=", told)
        return self._usable

    def is_private(self, home: str | Path) -> bool:
        """False if kcoord is off, or another user may write where `home` lies: nothing is loaded from there, or published there.

        After the first look at a directory it costs no system call.
        """
        tier = os.path.dirname(home)  # noqa: PTH120 - on every kernel's way
        private = self._is_private.get(tier)
        if private is None:
            told = "artifacts are not shared there"
            private = self._is_private[tier] = self.usable and self._is_good(lambda: check_tier(Path(tier)), "", told)
        return private

    def takes(self, home: Path) -> bool:
        """False if this user cannot publish around `home`, a place outside the local directory: it is root's, or read-only.

        Also False, and told, if others may write to its directory for staging. Looks once at each directory.
        """
        tier = os.path.dirname(home)  # noqa: PTH120
        taken = self._takes.get(tier)
        if taken is None:
            taken = self._takes[tier] = home.is_relative_to(self._local_dir) or self._may_stage(Path(tier))
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

    def new(self, home: Path) -> Path:
        """A staging directory on the disk of `home`; a private one if that disk refuses, which is told. Raises `StoreError`."""
        if self.is_private(home):
            try:
                return local.new_staging(home, _LEAST_ROOM, self._local_dir)
            except StoreError as error:
                let_through(error)
                self._refused(error, f"the local directory: {error.remedy}")
        return self.new_private()

    def new_private(self) -> Path:
        """A new directory for this process alone, from which libraries load. Raises `StoreError` if no disk takes one."""
        for place in private_places():
            try:
                if takes_libraries(place, _LEAST_ROOM):
                    directory = Path(tempfile.mkdtemp(prefix="kcoord-", dir=place))
                    self.keep(directory)
                    return directory
            except OSError as error:
                let_through(error)
        tried = " and ".join(map(str, private_places()))
        raise StoreError(f"{tried}: no file can be written there and mapped as a library: free space, or set TMPDIR")

    def keep(self, directory: Path) -> None:
        """This process loads from `directory` until it ends, and then removes it."""
        self._own.append(directory)

    def is_shared(self, directory: Path) -> bool:
        """True if what is staged in `directory` may become an artifact that others see."""
        return directory not in self._own

    def instead_of(self, staging: Path, error: OSError) -> Path | None:
        """A private directory in place of `staging`, which is removed; None if `staging` still takes files, or is private.

        Raises `StoreError` if no disk takes one.
        """
        if staging in self._own or local.takes_files(staging, _LEAST_ROOM):
            return None
        self._refused(store_error(error, staging.parent), f"the local directory: {store_error(error, staging).remedy}")
        shutil.rmtree(staging, ignore_errors=True)
        return self.new_private()

    def instead_of_lost(self, staging: Path) -> Path:
        """A private directory in place of `staging`, which somebody has removed in mid-compile."""
        self._notices.tell(
            f"{staging} has vanished in mid-compile; the kernel is compiled again: does something clean {staging.parent}?",
            about=f"vanished from {staging.parent}",
        )
        return self.new_private()

    def close(self) -> None:
        private, self._own = self._own, []
        for directory in private:
            shutil.rmtree(directory, ignore_errors=True)

    def forget_after_fork(self) -> None:
        """The parent removes its own private directories."""
        self._own = []

    def _refused(self, error: StoreError, about: str) -> None:
        self._notices.tell(f"{error}; this process keeps its kernels in a directory of its own", about=about)


def watch_temporary_directories() -> None:
    """Remember the directories that this process makes from now on by `tempfile.mkdtemp` or `TemporaryDirectory`. Idempotent."""
    native = tempfile.mkdtemp
    if getattr(native, "__module__", "") == __name__:
        return

    def mkdtemp(*args: Any, **kwargs: Any) -> Any:
        made = native(*args, **kwargs)
        _made[os.path.abspath(os.fsdecode(made))] = None  # noqa: PTH100 - without a look at the disk
        return made

    mkdtemp.__doc__ = native.__doc__
    tempfile.mkdtemp = mkdtemp  # `TemporaryDirectory` looks it up there


def inherit_temporary(directory: str) -> None:
    """Remember a directory that the parent of this process made so, and that it was started with."""
    _made[os.path.abspath(directory)] = None  # noqa: PTH100 - as above


def is_temporary(path: Path) -> bool:
    """True if `path` lies below such a directory."""
    return bool(_made) and any(str(parent) in _made for parent in path.parents)
