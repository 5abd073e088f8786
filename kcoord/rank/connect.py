"""This process's coordinators, one for each set of settings."""

from __future__ import annotations

import os
import threading
from dataclasses import replace

from kcoord.keys.environment import Environment
from kcoord.packs.automatic import of_this_process
from kcoord.rank.coordinator import Coordinator
from kcoord.ranks import ranks_of
from kcoord.settings import FIELDS, Settings, unknown_variables, variable

_environment = Environment(variable(f.name) for f in FIELDS)
_coordinators: dict[Settings, Coordinator] = {}
_last: tuple[tuple[object, ...], Coordinator] | None = None  # the last call's environment and flags, and its answer
_lock = threading.RLock()  # protects the two above; reentrant, since a signal's handler may call `connect` meanwhile


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_forget_after_fork)


def connect(**flags: str | None) -> Coordinator:
    """This process's coordinator, made at the first call; it finds, or starts, the node's agent when it needs it.

    `flags` are settings by name, as text, and win over the environment. Another set of settings has a coordinator of its own,
    for as long as the process lives. Raises `SettingsError` if a setting cannot be used.
    """
    global _last
    asked = (_environment.token(), *flags.items())  # cheap: every hit passes here
    last = _last
    if last is not None and last[0] == asked:
        return last[1]
    with _lock:
        settings = Settings.of_job(**flags)
        if settings.profile is None:
            settings = replace(settings, profile=of_this_process(ranks_of().world or 1))
        coordinator = _coordinators.get(settings)
        if coordinator is None:
            coordinator = _coordinators.setdefault(settings, Coordinator(settings))
            for line in unknown_variables():  # without a launcher, and then once for all ranks
                if ranks_of().rank in (None, 0):
                    coordinator.notices.tell(line)
        _last = asked, coordinator
        return coordinator
