"""A job's counters on this node, kept in files so that they outlast the agents that added them up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from kcoord.telemetry.job_names import directory_name, job_of
from kcoord.telemetry.metrics import complete

_KEPT = 7 * 86400.0  # seconds


class Ledger:
    """``<local dir>/stats/<job>/<agent>.json``: what each agent counted. `agent` writes only its own."""

    def __init__(self, local_dir: Path, agent: str) -> None:
        self._root, self._agent = local_dir / "stats", agent
        self._mine: dict[str, dict[str, float]] = {}
        self._unsaved: set[str] = set()

    def add(self, job: str, counters: dict[Any, Any]) -> None:
        """Add counters that a client reported; what is no counter is left out."""
        sums = self._mine.setdefault(job, {})
        for name in complete({}):
            amount = counters.get(name, 0)
            if isinstance(amount, (int, float)) and 0 <= amount < 1e15:
                sums[name] = sums.get(name, 0) + amount
        self._unsaved.add(job)

    def save(self) -> list[str]:
        """Write what has changed; returns those jobs. Raises OSError."""
        changed, self._unsaved = sorted(self._unsaved), set()
        for job in changed:
            directory = self._root / directory_name(job)
            directory.mkdir(parents=True, exist_ok=True)
            fresh = directory / f".{self._agent}"
            fresh.write_text(json.dumps(self._mine[job]))
            fresh.replace(directory / f"{self._agent}.json")
        return changed

    def mine(self, job: str) -> dict[str, float]:
        return dict(self._mine.get(job, {}))

    def by_agent(self, job: str) -> dict[str, dict[str, float]]:
        """Each agent's counters of `job` on this node."""
        found = {}
        for path in sorted((self._root / directory_name(job)).glob("*.json")):
            try:
                sums = json.loads(path.read_text())
            except (OSError, ValueError):
                continue
            if isinstance(sums, dict):
                found[path.stem] = {k: v for k, v in sums.items() if isinstance(v, (int, float))}
        if self._agent and job in self._mine:
            found[self._agent] = self.mine(job)
        return found

    def jobs(self) -> list[str]:
        """Every job of the last week, on this node."""
        on_disk = {job_of(p) for p in self._root.glob("*") if p.is_dir()}
        return sorted(on_disk | self._mine.keys())

    def forget_old(self) -> None:
        """Remove what has not changed for a week. Raises OSError."""
        for path in self._root.glob("*/*.json"):
            if time.time() - path.stat().st_mtime > _KEPT:
                path.unlink(missing_ok=True)

    def total(self, job: str | None) -> dict[str, Any]:
        """The sums of `job`, or of all jobs, over this node's agents."""
        jobs = [job] if job else self.jobs()
        return add_up({j: self.by_agent(j) for j in jobs})


def add_up(by_job: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """``{job: {agent: counters}}`` as one sum: jobs, number of agents, counters."""
    total: dict[str, float] = {}
    agents: set[str] = set()
    for by_agent in by_job.values():
        agents |= by_agent.keys()
        for sums in by_agent.values():
            for name, amount in sums.items():
                total[name] = total.get(name, 0) + amount
    return {"jobs": sorted(by_job), "agents": len(agents), "counters": complete(total)}
