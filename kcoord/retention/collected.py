"""The result of one pass of garbage collection, over a store or a local tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from kcoord.retention.limits import Doomed, Entry

BLOCK = 4096  # bytes: the least that a file takes


def blocks(size: int) -> int:
    """`size` bytes in whole blocks, in bytes."""
    return -(-size // BLOCK) * BLOCK


@dataclass
class Collected:
    """The artifacts that a pass found, and those that it removed: `removed` is in the trash now (or would be, in a dry run).

    Packs count in sizes and inodes, and not as artifacts. `refused`: how many it should have removed, and this user may not
    rename. `tidied` counts other files, by their kind.
    """

    artifacts: int = 0
    size: int = 0
    inodes: int = 0
    pinned: int = 0
    removed: list[Doomed] = field(default_factory=list)
    refused: int = 0
    over: str = ""
    tidied: dict[str, int] = field(default_factory=dict)

    @property
    def removed_size(self) -> int:
        return sum(d.entry.size for d in self.removed)

    @property
    def left(self) -> tuple[int, int, int]:
        """Artifacts, bytes and inodes that are there after the pass."""
        inodes = self.inodes - sum(d.entry.inodes for d in self.removed)
        return self.artifacts - sum(not d.entry.is_pack for d in self.removed), self.size - self.removed_size, inodes

    def add_found(self, entries: Iterable[Entry], pinned: Collection[str] = ()) -> None:
        """Count `entries`; `pinned` are names."""
        for entry in entries:
            self.artifacts += not entry.is_pack
            self.size += entry.size
            self.inodes += entry.inodes
            self.pinned += not entry.is_pack and entry.name in pinned

    def count(self, kind: str, number: int) -> None:
        if number:
            self.tidied[kind] = self.tidied.get(kind, 0) + number
