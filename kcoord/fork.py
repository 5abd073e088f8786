"""Objects whose state a forked child must not share with its parent: locks that another thread held, sockets, counters.

A module that has such state in its globals uses `os.register_at_fork` itself.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class _Forgetful(Protocol):
    def forget_after_fork(self) -> None: ...


_registered: weakref.WeakSet[_Forgetful] = weakref.WeakSet()


def forgets_after_fork(thing: _Forgetful) -> None:
    """Call ``thing.forget_after_fork()`` in every child that is forked while `thing` lives. Keeps no reference to it."""
    _registered.add(thing)


def _forget_all() -> None:
    for thing in list(_registered):
        thing.forget_after_fork()


os.register_at_fork(after_in_child=_forget_all)
