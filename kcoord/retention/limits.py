"""The limits of retention, and the choice of artifacts to remove. No I/O here.

An artifact that is pinned, or younger than the least age, is never chosen, whatever the limits say. The others are chosen in this
order: those unused for too long, those too old, those of a toolchain that nobody uses, and, for the limits of size and count,
those used longest ago.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, fields

from kcoord.units import bytes_text, span_text

LOCAL_BOUND = (
    10 << 30
)  # bytes of this node's own copies where no setting bounds them, and the most of their file system
LOCAL_SHARE = 0.05
LEAST_AGE = 3600.0  # seconds: other nodes are about to fetch the artifacts that a running job has just published


@dataclass(frozen=True)
class Limits:
    """None: no limit. Times in seconds, `max_size` in bytes, `max_files` counts files and directories (inodes).

    `toolchain_gone`: remove the artifacts of a toolchain of which none was used for so long.
    """

    max_size: int | None = None
    max_files: int | None = None
    unused_for: float | None = None
    older_than: float | None = None
    toolchain_gone: float | None = None
    least_age: float = LEAST_AGE

    @property
    def any(self) -> bool:
        return any(getattr(self, f.name) is not None for f in fields(self) if f.name != "least_age")


@dataclass(frozen=True, slots=True)
class Entry:
    """One artifact, or a pack. `size` in bytes, in whole blocks; `inodes` with its directory; `used` by the file system's
    clock, `made` by that or, if manifests were read, by the clock of the host that compiled it.

    `name` is the digest of its key in the store, a path in the local tier. `toolchain` is empty if nobody looked, or can tell.
    `touched` is its modification time. `is_pack`: it is the pack of a profile, and `name` its path below ``v2``.
    """

    name: str
    size: int
    inodes: int
    made: float
    used: float
    toolchain: str = ""
    is_pack: bool = False
    touched: float = 0.0


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
    gone = _toolchains_gone(entries, limits.toolchain_gone, now)
    removable = [e for e in entries if e.name not in pinned and now - max(e.made, e.touched) >= limits.least_age]
    doomed: list[Doomed] = []
    rest: list[Entry] = []
    for entry in removable:
        rule, why = _outlived(entry, limits, now, gone)
        if rule:
            doomed.append(Doomed(entry, rule, why))
        else:
            rest.append(entry)
    doomed.sort(key=lambda d: d.entry.used)
    size = sum(e.size for e in entries) - sum(d.entry.size for d in doomed)
    inodes = sum(e.inodes for e in entries) - sum(d.entry.inodes for d in doomed)
    over_size, over_files = _above(size, limits.max_size), _above(inodes, limits.max_files)
    why_size = f"of {bytes_text(size)}, {bytes_text(limits.max_size or 0)} may stay"
    why_files = f"of {inodes:,} files, {limits.max_files or 0:,} may stay"
    for entry in sorted(rest, key=lambda e: (e.used, e.made)) if over_size or over_files else ():
        if over_size <= 0 and over_files <= 0:
            break
        rule, why = ("max-size", why_size) if over_size > 0 else ("max-files", why_files)
        doomed.append(Doomed(entry, rule, f"{why}; unused for {span_text(now - entry.used)}"))
        over_size, over_files = over_size - entry.size, over_files - entry.inodes
    return Plan(doomed, _over_text(over_size, over_files))


def _above(amount: int, most: int | None) -> int:
    return max(0, amount - most) if most is not None else 0


def _outlived(entry: Entry, limits: Limits, now: float, gone: dict[str, float]) -> tuple[str, str]:
    unused, age = now - entry.used, now - entry.made
    if limits.unused_for is not None and unused > limits.unused_for:
        return "unused-for", f"unused for {span_text(unused)}"
    if limits.older_than is not None and age > limits.older_than:
        return "older-than", f"made {span_text(age)} ago"
    if entry.toolchain in gone:
        return "toolchain-gone", f"{entry.toolchain} has not been used for {span_text(gone[entry.toolchain])}"
    return "", ""


def _toolchains_gone(entries: Iterable[Entry], limit: float | None, now: float) -> dict[str, float]:
    """Toolchains that nobody has used for longer than `limit`, and for how long."""
    if limit is None:
        return {}
    latest: dict[str, float] = {}
    for entry in entries:
        if entry.toolchain:
            latest[entry.toolchain] = max(latest.get(entry.toolchain, entry.used), entry.used)
    return {toolchain: now - used for toolchain, used in latest.items() if now - used > limit}


def _over_text(size: int, inodes: int) -> str:
    over = [f"{bytes_text(size)}"] if size > 0 else []
    over += [f"{inodes:,} files"] if inodes > 0 else []
    return f"{' and '.join(over)} more than allowed are pinned, too young or in use" if over else ""
