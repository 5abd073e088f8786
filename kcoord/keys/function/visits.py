"""The queue of a walk over code: each callable gets a label at once, and is visited later.

So a chain of calls may be longer than Python's stack, and a function that calls itself meets its own label.

A visit is strict or lenient. In a lenient one (a decorator's wrapper, a class) a value without identity counts by its type.
A callable that is met in both ways is visited strictly. Hence lenient visits come last, and are inherited by all that they meet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Identity = tuple[int, type | None, int]
"""A callable: its id, the class that it is called on, and the id of the object, if that is known. Valid during one walk."""
Visit = Callable[[str], None]


@dataclass
class VisitQueue:
    lenient: bool = False
    """True while the current visit is lenient."""
    is_over: bool = False
    _labels: dict[Identity, str] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)  # keeps the objects that `_labels` names by id
    _numbers: Counter[str] = field(default_factory=Counter)
    _seen: set[str] = field(default_factory=set)
    _strict: dict[str, Visit] = field(default_factory=dict)
    _lenient: dict[str, Visit] = field(default_factory=dict)

    def run(self) -> None:
        """Visit all that was added, and all that is added meanwhile."""
        while self._strict or self._lenient:
            self.lenient = not self._strict
            label, visit = (self._strict or self._lenient).popitem()
            visit(label)
        self.is_over = True

    def label(self, where: Identity, thing: Any, name: str) -> str:
        """The label of `thing`. Things of one name (closures of one factory) are numbered in the order in which they are met.

        After the walk no new number is given: a watch that describes a value again must not change the labels.
        """
        if where not in self._labels:
            if self.is_over:
                return f"{name} (new)"
            self._numbers[name] += 1
            number = self._numbers[name]
            self._labels[where] = name if number == 1 else f"{name}#{number}"
            self._alive.append(thing)
        return self._labels[where]

    def add(self, label: str, visit: Visit, lenient: bool = False) -> None:
        """Visit `label` once: leniently if only lenient calls and visits add it."""
        lenient = lenient or self.lenient
        if self.is_over:
            return
        if label not in self._seen:
            self._seen.add(label)
            (self._lenient if lenient else self._strict)[label] = visit
        elif not lenient and label in self._lenient:
            self._strict[label] = self._lenient.pop(label)
