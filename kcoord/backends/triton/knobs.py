"""Triton's knobs (`triton.knobs`) by their values, where the environment does not tell them.

A knob that is set in Python writes its variable, unless ``propagate_env`` is off or the value has no text; then it hides the
variable. So a key holds the environment, and these knobs.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import triton

from kcoord.backends.triton.variables import NEUTRAL_KNOBS

_PLAIN = (bool, int, str, type(None))


def hidden_knobs() -> tuple[tuple[str, Any], ...]:
    """The knobs that change kernels and have another value than their variables give, with this value."""
    found = []
    for section, name, knob in _keyed_knobs():
        holder = getattr(triton.knobs, section)
        if not hasattr(knob, "key"):  # an attribute: it has read its variable once
            if (value := getattr(holder, name)) and isinstance(value, _PLAIN):
                found.append((f"{section}.{name}", value))
        elif name in vars(holder) and (value := getattr(holder, name)) != knob.get():
            found.append((f"{section}.{name}", value if isinstance(value, _PLAIN) else repr(value)))
    return tuple(found)


@functools.cache
def _keyed_knobs() -> tuple[tuple[str, str, Any], ...]:
    return tuple(each for each in all_knobs() if not {each[0], f"{each[0]}.{each[1]}"} & NEUTRAL_KNOBS.keys())


def all_knobs() -> Iterator[tuple[str, str, Any]]:
    """Section, name, and descriptor or default, of all that can be set."""
    for section, holder in vars(triton.knobs).items():
        if isinstance(holder, triton.knobs.base_knobs):
            for name, knob in vars(type(holder)).items():
                if not name.startswith("_") and not isinstance(knob, (property, types.FunctionType)):
                    yield section, name, knob


def count_changes_of_knobs(count: Callable[[], None]) -> None:
    """Call `count` from now on when a knob is set or deleted, or a scope of knobs ends. Idempotent."""
    kind = triton.knobs.base_knobs
    if hasattr(kind.__setattr__, "__wrapped__"):
        return

    def counting(original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def change(self: Any, *arguments: Any) -> None:
            original(self, *arguments)
            count()

        return change

    kind.__setattr__, kind.__delattr__ = counting(kind.__setattr__), counting(kind.__delattr__)
    stock = kind.scope

    @functools.wraps(stock)
    @contextlib.contextmanager
    def scope(self: Any) -> Iterator[None]:
        try:
            with stock(self):
                yield
        finally:
            count()

    kind.scope = scope
