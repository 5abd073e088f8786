"""This process's coordinator, one for each set of settings that it uses."""

from __future__ import annotations

import os
import threading

from kcoord.keys.environment import Environment
from kcoord.rank.coordinator import Coordinator
from kcoord.settings import FIELDS, Settings, variable

_Asked = tuple[object, ...]
_current: tuple[_Asked, Coordinator] | None = None
_made: dict[Settings, Coordinator] = {}
_lock = threading.RLock()  # protects both; a signal's handler may come here while its thread is in here


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_forget_after_fork)

_environment = Environment(variable(f.name) for f in FIELDS)


def connect(**flags: str | None) -> Coordinator:
    """This process's coordinator, made at the first call; it finds, or starts, the node's agent when it needs it.

    `flags` are settings by name, as text, and win over the environment. Another set of settings has a coordinator of its own,
    for as long as the process lives. Raises `SettingsError` if a setting cannot be used.
    """
    global _current
    asked = (_environment.token(), *flags.items())  # cheap: every hit passes here
    current = _current
    if current is not None and current[0] == asked:
        return current[1]
    with _lock:
        settings = Settings.from_environ(**flags)
        coordinator = _made.get(settings)
        if coordinator is None:
            coordinator = _made.setdefault(settings, Coordinator(settings))
        _current = asked, coordinator
        return coordinator
