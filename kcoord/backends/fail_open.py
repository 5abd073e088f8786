"""A fault of kcoord is no fault of the job: hooks fail open, and this process's backends tell of it once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from kcoord.errors import SettingsError, StoreError
from kcoord.files.faults import is_of_a_disk
from kcoord.interruption import let_through
from kcoord.telemetry.events import Notices, log

if TYPE_CHECKING:
    from kcoord.rank.coordinator import Coordinator

F = TypeVar("F", bound=Callable[..., Any])

notices = Notices()
"""Notices of this process's backends, each told once."""


def fails_open(otherwise: Callable[..., Any]) -> Callable[[F], F]:
    """Wrap a hook so that an error inside kcoord is logged, once, and ``otherwise(*args)`` answers in its place.

    A disk that refuses kcoord's own files is told in one line, with the remedy. An exception that a signal handler of the
    script raised meanwhile is the script's, and is raised. This is the one broad `except` of a rank: an error that nobody
    foresaw must not fail a training job.
    """

    def decorate(hook: F) -> F:
        @functools.wraps(hook)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - see above
                let_through(error)
                if isinstance(error, StoreError) or is_of_a_disk(error):
                    notices.tell(f"{error}; kcoord stands aside", about=f"a disk: {type(error).__name__}")
                elif notices.tell(f"an error in kcoord, please report it: {type(error).__name__}: {error}"):
                    log.warning("where it happened", exc_info=error)
                return otherwise(*args, **kwargs)

        return guarded  # type: ignore[return-value]

    return decorate


@fails_open(lambda: None)
def coordinator_in_use() -> Coordinator | None:
    """None if kcoord is off, or its settings cannot be used: then the compiler works as without kcoord."""
    from kcoord.rank.connect import connect  # weight: a process whose compilers are hooked may compile nothing

    try:
        coordinator = connect()
    except SettingsError as error:
        notices.tell(f"{error}; kcoord stands aside")
        return None
    return None if coordinator.settings.disable else coordinator
