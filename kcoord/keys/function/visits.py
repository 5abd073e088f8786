"""What a walk has met and is still to visit. Labels are given at once, visits come later.

So a chain of calls may be longer than Python's stack, and a function that calls itself meets its own label.

Visits are strict, or lenient: what a decorator's wrapper or a class holds may have no identity, and counts by its type then.
What is met in both ways is visited strictly; hence the lenient visits come last, and whatever they meet is theirs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Where = tuple[int, type | None, int]
"""A thing by its id, the class that it is called on, and the id of the object, if that is known. Of use in one walk."""
Visit = Callable[[str], None]


@dataclass
class Agenda:
    lenient: bool = False
    """Whether the visit that is under way is."""
    is_over: bool = False
    _labels: dict[Where, str] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)  # what `_labels` names by id lives as long as the walk
    _numbers: Counter[str] = field(default_factory=Counter)
    _met: set[str] = field(default_factory=set)
    _strict: dict[str, Visit] = field(default_factory=dict)
    _later: dict[str, Visit] = field(default_factory=dict)

    def run(self) -> None:
        """Visit everything, and what is met on the way."""
        while self._strict or self._later:
            self.lenient = not self._strict
            label, visit = (self._strict or self._later).popitem()
            visit(label)
        self.is_over = True

    def label(self, where: Where, thing: Any, name: str) -> str:
        """Things of one name (closures of one factory) are numbered in the order in which they are met.

        When the walk is over nothing gets a number any more: a watch that describes a value anew must not change what it finds.
        """
        if where not in self._labels:
            if self.is_over:
                return f"{name} (new)"
            self._numbers[name] += 1
            number = self._numbers[name]
            self._labels[where] = name if number == 1 else f"{name}#{number}"
            self._kept.append(thing)
        return self._labels[where]

    def add(self, label: str, visit: Visit, lenient: bool = False) -> None:
        """Visit `label` once. Leniently if so asked, or if nothing but lenient visits ever meet it."""
        lenient = lenient or self.lenient
        if self.is_over:
            return
        if label not in self._met:
            self._met.add(label)
            (self._later if lenient else self._strict)[label] = visit
        elif not lenient and label in self._later:
            self._strict[label] = self._later.pop(label)
