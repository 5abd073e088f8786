"""Two runs compared: their sums, and the keys that only the later one asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kcoord.artifacts.manifest import Manifest
from kcoord.report.differences import Differences, Miss, by_key_and_name, differences_of, grouped, nearest
from kcoord.report.findings import Findings, Kernel, findings_of
from kcoord.report.tables import seconds
from kcoord.report.timeline import Timeline


@dataclass(frozen=True)
class Comparison:
    """`job`: the earlier run's name. `sums`: by name, of both runs. `new`: keys that only the later run asked for, by reason."""

    job: str
    sums: dict[str, tuple[float, float]]
    new: list[Miss]

    def texts(self) -> list[tuple[str, str, str]]:
        """Each sum's name, and its values as people read them."""
        found = []
        for name, (earlier, later) in self.sums.items():
            text = seconds if name.endswith("seconds") else "{:,.0f}".format
            found.append((name.replace("_", " "), text(earlier), text(later)))
        return found


def compare(earlier: Timeline, later: Timeline, found: Findings, manifests: Iterable[Manifest]) -> Comparison:
    """Compare two runs; `found` is of the later one."""
    before = findings_of(earlier)
    named: dict[tuple[str, str], list[Manifest]] = {}
    by_key, _ = by_key_and_name(manifests)
    for kernel in before.kernels:
        known = [by_key[kernel.key]] if kernel.key in by_key else []
        named.setdefault((kernel.backend, kernel.name), []).extend(known)

    def reason(kernel: Kernel) -> tuple[str, Differences]:
        relatives = named.get((kernel.backend, kernel.name))
        if relatives is None:
            return "the earlier run asked for no kernel of this name", ()
        mine = by_key.get(kernel.key)
        theirs = nearest(relatives, mine) if mine is not None else None
        if mine is None or theirs is None:
            return "the earlier run asked for other keys of this name; it is not known which factors differ", ()
        return "the earlier run had another value of these factors", differences_of(theirs, mine)

    asked = {kernel.key for kernel in before.kernels}
    new = [(k, *reason(k)) for k in found.kernels if not k.aside and k.key not in asked]
    was, now = _sums(earlier, before), _sums(later, found)
    return Comparison(earlier.job, {name: (was[name], now[name]) for name in now}, grouped(new))


def _sums(timeline: Timeline, found: Findings) -> dict[str, float]:
    begin, end = found.episodes[0] if found.episodes else (0.0, 0.0)
    return {
        "ranks": timeline.ranks,
        "kernels": sum(not k.aside for k in found.kernels),
        "compiled": len(found.compiled),
        "compile_seconds": found.compile_seconds,
        "loads": found.loads,
        "wait_seconds": found.wait_seconds,
        "first_steps_seconds": end - begin,
    }
