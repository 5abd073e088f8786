"""The limits of retention, the choice of artifacts to remove, and the result of a pass. No I/O here.

An artifact that is pinned, or younger than the least age, is never chosen, whatever the limits say. The others are chosen in this
order: those unused for too long, and, for the limits of size and count, those used longest ago.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields
from typing import Literal

from kcoord.units import bytes_text, span_text

LOCAL_BOUND, LOCAL_SHARE = 10 << 30, 0.05
"""Bounds of the local directory where no setting has one: bytes, and the share of its file system. The smaller counts."""
BLOCK = 4096  # bytes: the least that a file takes
LEAST_AGE = 3600.0  # seconds: other nodes are about to fetch the artifacts that a running job has just published


@dataclass(frozen=True)
class Limits:
    """None: no limit. Times in seconds, `max_size` in bytes, `max_files` counts files and directories (inodes)."""

    max_size: int | None = None
    max_files: int | None = None
    unused_for: float | None = None
    least_age: float = LEAST_AGE

    @property
    def any(self) -> bool:
        return any(getattr(self, f.name) is not None for f in fields(self) if f.name != "least_age")


@dataclass(frozen=True, slots=True)
class Entry:
    """One artifact, the pack of a profile, or a directory of a compiler's own cache. `size` in bytes, in whole blocks; `inodes`
    with its directory; `made` and `used` by the file system's clock.

    `name` is the digest of its key in the store, a path in the local tier, a pack's path below ``v2``.
    """

    name: str
    size: int
    inodes: int
    made: float
    used: float
    kind: Literal["artifact", "pack", "cache"] = "artifact"


@dataclass(frozen=True, slots=True)
class Doomed:
    entry: Entry
    rule: str
    why: str


@dataclass(frozen=True)
class Plan:
    """`doomed`, the first to go first. `over`: by how much a limit is still exceeded, for people; empty: all limits are kept."""

    doomed: list[Doomed]
    over: str = ""


def choose(entries: Collection[Entry], limits: Limits, now: float, pinned: Collection[str] = ()) -> Plan:
    """Choose from `entries` by `limits`; `pinned` are names. `now` is the time of the file system that `entries` lie on."""
    oldest_first = sorted(entries, key=lambda e: (e.used, e.made))
    removable = [e for e in oldest_first if e.name not in pinned and now - e.made >= limits.least_age]
    longest = float("inf") if limits.unused_for is None else limits.unused_for
    unused = [e for e in removable if now - e.used > longest]
    doomed = [Doomed(e, "unused-for", f"unused for {span_text(now - e.used)}") for e in unused]
    size = sum(e.size for e in entries) - sum(d.entry.size for d in doomed)
    inodes = sum(e.inodes for e in entries) - sum(d.entry.inodes for d in doomed)
    over_size, over_files = _above(size, limits.max_size), _above(inodes, limits.max_files)
    why_size = f"of {bytes_text(size)}, {bytes_text(limits.max_size or 0)} may stay"
    why_files = f"of {inodes:,} files, {limits.max_files or 0:,} may stay"
    for entry in removable[len(unused) :]:
        if over_size <= 0 and over_files <= 0:
            break
        rule, why = ("max-size", why_size) if over_size > 0 else ("max-files", why_files)
        doomed.append(Doomed(entry, rule, f"{why}; unused for {span_text(now - entry.used)}"))
        over_size, over_files = over_size - entry.size, over_files - entry.inodes
    return Plan(doomed, _over_text(over_size, over_files))


def _above(amount: int, most: int | None) -> int:
    return max(0, amount - most) if most is not None else 0


def _over_text(size: int, inodes: int) -> str:
    over = [f"{bytes_text(size)}"] if size > 0 else []
    over += [f"{inodes:,} files"] if inodes > 0 else []
    return f"{' and '.join(over)} more than allowed are pinned, too young or in use" if over else ""


@dataclass
class Collected:
    """The artifacts that a pass found, and those that it removed: `removed` is in the trash now (or would be, in a dry run).

    Packs and compilers' directories count in sizes and inodes, and not as artifacts. `refused`: how many it should have
    removed, and this user may not rename. `tidied` counts other files, by their kind.
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
        return (
            self.artifacts - sum(d.entry.kind == "artifact" for d in self.removed),
            self.size - self.removed_size,
            inodes,
        )

    def add_found(self, entries: Iterable[Entry], pinned: Collection[str] = ()) -> None:
        """Count `entries`; `pinned` are names."""
        for entry in entries:
            self.artifacts += entry.kind == "artifact"
            self.size += entry.size
            self.inodes += entry.inodes
            self.pinned += entry.kind == "artifact" and entry.name in pinned

    def count(self, kind: str, number: int) -> None:
        if number:
            self.tidied[kind] = self.tidied.get(kind, 0) + number


def blocks(size: int) -> int:
    """`size` bytes in whole blocks, in bytes."""
    return -(-size // BLOCK) * BLOCK
