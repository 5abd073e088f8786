"""Requests for entries of torch's own caches.

A *unit* is what Dynamo hands to AOTAutograd: a graph with its forward, its backward and their metadata. A *graph* is one FX graph
that Inductor compiles. Both have torch's own key, and an artifact of either is the entries that torch would keep in its caches.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

UNIT, GRAPH = "aot_autograd", "inductor"
"""The kinds of entries, by torch's names of their caches."""
FILE = "entries.msgpack"

Entries = dict[tuple[str, str], list[bytes]]
"""Contents by kind and torch's key: variants of one key differ in their guards."""


@dataclass(frozen=True)
class Entry:
    """A request for an entry. `hints`: the values that the graph's symbolic sizes have now. `donated`: the saved tensors whose
    memory a backward may take, which torch's key leaves open. `problem`: why it is not shared. `graph`: torch's, for people.
    """

    kind: str
    key: str
    hints: tuple[int, ...] = ()
    donated: tuple[int, ...] = ()
    problem: str = ""
    graph: Any = field(default=None, compare=False, repr=False)


def write_entries(path: Path, entries: Iterable[tuple[str, str, bytes]]) -> None:
    path.write_bytes(msgpack.packb([list(entry) for entry in entries]))


def read_entries(path: Path) -> Entries:
    found: Entries = {}
    for kind, key, content in msgpack.unpackb(path.read_bytes()):
        found.setdefault((kind, key), []).append(content)
    return found
