"""This process's coordinator."""

from __future__ import annotations

import os
import threading

from kcoord.coordinator import Coordinator
from kcoord.keys.environment import Environment
from kcoord.settings import FIELDS, Settings, variable

_Asked = tuple[object, ...]
_current: tuple[_Asked, Coordinator] | None = None
_lock = threading.Lock()  # protects _current


def _forget_after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # a thread of the parent may have held it


os.register_at_fork(after_in_child=_forget_after_fork)

_environment = Environment(variable(f.name) for f in FIELDS)


def connect(**flags: str | None) -> Coordinator:
    """This process's coordinator, made at the first call; it finds, or starts, the node's agent when it needs it.

    `flags` are settings by name, as text, and win over the environment; a different set makes a new coordinator. Raises
    `SettingsError` if a setting cannot be used.
    """
    global _current
    asked = (_environment.token(), *flags.items())  # cheap: every hit passes here
    current = _current
    if current is not None and current[0] == asked:
        return current[1]
    with _lock:
        settings = Settings.from_environ(**flags)
        if _current is None or _current[1].settings != settings:
            _current = asked, Coordinator(settings)
        _current = asked, _current[1]
        return _current[1]
