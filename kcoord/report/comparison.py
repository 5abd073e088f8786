"""Two runs compared: their sums, kernels that compile more slowly in the later one, and keys that only one of them asked for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from kcoord.artifacts.manifest import Manifest
from kcoord.report.findings import Findings, Kernel, findings_of
from kcoord.report.misses import UNKNOWN, Differences, Miss, differences_of, grouped, these
from kcoord.report.relatives import nearest
from kcoord.report.tables import seconds
from kcoord.report.timeline import Timeline
from kcoord.report.variants import tell_apart
from kcoord.telemetry.spans import KEY_DIGITS

_NOTICEABLE = 0.05  # seconds; and a tenth of the earlier compile: less is noise
_LABELS = {
    "ranks": "ranks",
    "kernels": "kernels asked for",
    "compiled": "kernels compiled",
    "compile_seconds": "spent compiling",
    "loads": "loads",
    "waits": "waits",
    "wait_seconds": "spent waiting",
    "first_steps_seconds": "until the first steps had their kernels",
}


@dataclass(frozen=True)
class Change:
    """A sum of both runs; in seconds if its `name` says so."""

    name: str
    earlier: float
    later: float

    @property
    def label(self) -> str:
        return _LABELS[self.name]

    @property
    def texts(self) -> tuple[str, str, str]:
        """Earlier, later, and the difference with its sign; empty if there is none."""
        more = self.later - self.earlier
        sign = "+" if more > 0 else "−"
        if self.name.endswith("seconds"):
            return seconds(self.earlier), seconds(self.later), f"{sign}{seconds(abs(more))}" if more else ""
        return f"{self.earlier:,.0f}", f"{self.later:,.0f}", f"{sign}{abs(more):,.0f}" if more else ""


@dataclass(frozen=True)
class Slower:
    """A kernel whose compile took longer than that of `before`: the same key, or the earlier run's nearest relative, which has
    these `differences`.
    """

    kernel: Kernel
    before: Kernel
    differences: Differences

    @property
    def seconds(self) -> float:
        return self.kernel.one_compile - self.before.one_compile


@dataclass(frozen=True)
class Comparison:
    """`job`: the earlier run's name. `slower`: the longest difference first. `new`: keys that only the later run asked for, by
    reason. `gone`: keys that only the earlier run asked for.
    """

    job: str
    changes: tuple[Change, ...]
    slower: tuple[Slower, ...]
    new: tuple[Miss, ...]
    gone: tuple[Kernel, ...]


def compare(earlier: Timeline, later: Timeline, found: Findings, manifests: Sequence[Manifest] | None) -> Comparison:
    """Compare two runs; `found` is of the later one. Without `manifests` it is not known which factors of new keys differ."""
    found_before = findings_of(earlier)
    tell_apart(found_before.kernels, manifests or ())
    before = {k.key: k for k in found_before.kernels if not k.aside}
    now = {k.key: k for k in found.kernels if not k.aside}
    relatives = _Relatives(before, manifests)
    slower: list[Slower] = []
    new: list[tuple[Kernel, str, Differences]] = []
    for key, kernel in now.items():
        known = before.get(key)
        differences: Differences = ()
        if known is None:
            known, reason, differences = relatives.explain(kernel)
            new.append((kernel, reason, differences))
        if known is not None and _is_slower(kernel, known):
            slower.append(Slower(kernel, known, differences))
    return Comparison(
        earlier.job,
        _changes((earlier, found_before), (later, found)),
        tuple(sorted(slower, key=lambda each: -each.seconds)),
        tuple(grouped(new)),
        tuple(kernel for key, kernel in before.items() if key not in now),
    )


class _Relatives:
    """The earlier run's kernels by name, with the manifests that are left of them."""

    def __init__(self, before: dict[str, Kernel], manifests: Sequence[Manifest] | None) -> None:
        self._before, self._explains = before, manifests is not None
        self._by_key = {m.key.digest[:KEY_DIGITS]: m for m in manifests or ()}
        self._by_name: dict[tuple[str, str], list[Manifest]] = defaultdict(list)
        self._names = {(kernel.backend, kernel.name) for kernel in before.values()}
        for key, kernel in before.items():
            if key in self._by_key:
                self._by_name[kernel.backend, kernel.name].append(self._by_key[key])

    def explain(self, kernel: Kernel) -> tuple[Kernel | None, str, Differences]:
        """The nearest relative of a new key, why the key is new, and the differences."""
        name = kernel.backend, kernel.name
        if name not in self._names:
            return None, "the earlier run asked for no kernel of this name", ()
        if not self._explains:
            return None, "another key of a kernel that the earlier run asked for, too", ()
        mine = self._by_key.get(kernel.key)
        if mine is None:
            return None, UNKNOWN, ()
        theirs = nearest(self._by_name[name], mine, at_any_time=True)
        if theirs is None:
            return None, "the earlier run's artifacts of this kernel are gone, so the reason is unknown", ()
        differences = differences_of(theirs, mine)
        before = self._before[theirs.key.digest[:KEY_DIGITS]]
        return before, f"the earlier run had another value of {these(differences)}", differences


def _is_slower(kernel: Kernel, before: Kernel) -> bool:
    more = kernel.one_compile - before.one_compile
    return before.one_compile > 0 and more >= max(_NOTICEABLE, before.one_compile / 10)


def _changes(earlier: tuple[Timeline, Findings], later: tuple[Timeline, Findings]) -> tuple[Change, ...]:
    before, now = _sums(*earlier), _sums(*later)
    return tuple(Change(name, before[name], now[name]) for name in now)


def _sums(timeline: Timeline, found: Findings) -> dict[str, float]:
    begin, end = found.episodes[0] if found.episodes else (0.0, 0.0)
    return {
        "ranks": timeline.ranks,
        "kernels": sum(not k.aside for k in found.kernels),
        "compiled": len(found.compiled),
        "compile_seconds": found.compile_seconds,
        "loads": found.loads,
        "waits": found.count_of.get("wait", 0),
        "wait_seconds": found.wait_seconds,
        "first_steps_seconds": end - begin,
    }
