"""What the rounds of a run came to, for people and as JSON."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

from tests.chaos.judge import Verdict
from tests.chaos.kinds import KINDS


class Report:
    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._rounds: Counter[str] = Counter()
        self._thrown: Counter[str] = Counter()
        self._met: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._seconds = 0.0
        self._longest = {"wait": 0.0, "publish": 0.0, "round": 0.0, "of_bound": 0.0}
        self._findings: list[dict[str, Any]] = []
        self._load: list[float] = []

    def add(self, verdict: Verdict) -> None:
        round_ = verdict.round
        self._rounds[round_.mode] += 1
        for one in verdict.thrown:
            self._thrown[one.fault.kind] += 1
            self._met[one.fault.kind] += one.met
        keys = len(round_.kernels)
        self._sums.update(keys=keys, compiles=verdict.compiles, duplicates=verdict.duplicates, lost=verdict.lost)
        self._seconds += verdict.took
        for name, value in (
            ("wait", verdict.longest_wait), ("publish", verdict.longest_publish), ("round", verdict.took),
            ("of_bound", verdict.took / round_.bound),
        ):  # fmt: skip
            self._longest[name] = max(self._longest[name], value)
        self._load.append(os.getloadavg()[0])
        if verdict.findings:
            kept = str(verdict.kept) if verdict.kept else None
            self._findings.append(
                {"round": round_.number, "mode": round_.mode, "findings": verdict.findings, "kept": kept}
            )

    def as_json(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "seconds": round(self._seconds, 1),
            "rounds": dict(self._rounds),
            "faults": {k: {"thrown": self._thrown[k], "met": self._met[k]} for k in KINDS if self._thrown[k]},
            **self._sums,
            "longest": {name: round(value, 3) for name, value in self._longest.items()},
            "load": round(sum(self._load) / max(1, len(self._load)), 2),
            "failed": self._findings,
        }

    def as_text(self) -> str:
        facts = self.as_json()
        lines = [
            f"seed {self.seed}: {sum(self._rounds.values())} rounds ({', '.join(f'{n} {m}' for m, n in self._rounds.items())})"
            f" in {self._seconds:.0f} s, load {facts['load']:g} on {os.cpu_count()} cores",
            f"{sum(self._met.values())} faults met something, of {sum(self._thrown.values())} thrown:",
            *(f"  {k:24} {v['met']:5} of {v['thrown']}" for k, v in facts["faults"].items()),
            f"{self._sums['keys']} keys, {self._sums['compiles']} compiles ended, {self._sums['duplicates']} of them duplicates; "
            f"{self._sums['lost']} more did not live to be handed in",
            f"longest: request {self._longest['wait']:.2f} s, publishing {self._longest['publish']:.2f} s, round "
            f"{self._longest['round']:.1f} s; at most {100 * self._longest['of_bound']:.0f} % of a round's bound was used",
            f"{len(self._findings)} rounds failed",
        ]
        return "\n".join(lines)
