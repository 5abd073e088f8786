"""A job's counters on this node, in files that outlive the agents that added them up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from kcoord.files.atomic import replace_file
from kcoord.files.private import make_own
from kcoord.telemetry.counters import COUNTERS, complete
from kcoord.telemetry.job_names import directory_name, job_of

_KEPT = 7 * 86400.0  # seconds
_LARGEST_FILE = 64 << 10  # bytes; it has a dozen numbers
_LARGEST = 1e15  # of a counter


class Ledger:
    """The counters of each agent, in ``<local dir>/stats/<job>/<agent>.json``. Writes only those of `agent`. Thread-safe.

    Every method but `add`, `mine` and `latest` blocks for as long as the disk does.
    """

    def __init__(self, local_dir: Path, agent: str) -> None:
        self._root, self._agent = local_dir / "stats", agent
        self._lock = threading.Lock()  # protects the two below
        self._mine: dict[str, dict[str, float]] = {}
        self._unsaved: set[str] = set()

    def add(self, job: str, counters: dict[Any, Any]) -> None:
        """Add counters from a client; ignores unknown names and malformed amounts."""
        with self._lock:
            sums = self._mine.setdefault(job, {})
            for name, amount in sums_of(counters).items():
                sums[name] = sums.get(name, 0) + amount
            self._unsaved.add(job)

    @property
    def unsaved(self) -> bool:
        return bool(self._unsaved)

    def save(self) -> list[str]:
        """Write changed counters; returns their jobs. Raises OSError and `StoreError`; then the next call writes the rest."""
        with self._lock:
            changed, self._unsaved = sorted(self._unsaved), set()
            sums = {job: dict(self._mine[job]) for job in changed}
        left = set(changed)
        try:
            for job in changed:
                self._write(self._root / directory_name(job), json.dumps(sums[job]))
                left.discard(job)
        finally:
            with self._lock:
                self._unsaved |= left
        return changed

    def _write(self, directory: Path, text: str) -> None:
        make_own(directory, self._root.parent)
        replace_file(directory / f"{self._agent}.json", text.encode())

    def mine(self, job: str) -> dict[str, float]:
        with self._lock:
            return dict(self._mine.get(job, {}))

    def latest(self, most: int) -> list[str]:
        """The jobs of this agent that began last."""
        with self._lock:
            return list(self._mine)[-most:]

    def by_agent(self, job: str) -> dict[str, dict[str, float]]:
        """Each agent's counters of `job` on this node."""
        files = [p for p in _listed(self._root / directory_name(job)) if p.suffix == ".json" and p.name[0] != "."]
        found = {path.stem: _read(path) for path in files}
        if self._agent and (mine := self.mine(job)):
            found[self._agent] = mine
        return found

    def jobs(self) -> list[str]:
        """Every job of the last week, on this node."""
        with self._lock:
            mine = {directory_name(job): job for job in self._mine}
        on_disk = {path.name: job_of(path) for path in _listed(self._root) if path.is_dir()}
        return sorted((on_disk | mine).values())  # a directory holds only a part of a long name

    def forget_old(self) -> None:
        """Remove jobs without a change for a week, as far as possible."""
        for directory in _listed(self._root):
            with suppress(OSError):  # another agent may be forgetting the same files
                if time.time() - directory.stat().st_mtime > _KEPT:  # each change renames a file into it
                    for path in directory.iterdir():
                        path.unlink(missing_ok=True)
                    directory.rmdir()

    def total(self, job: str | None) -> dict[str, Any]:
        """The sums of `job`, or of all jobs, over this node's agents."""
        jobs = [job] if job else self.jobs()
        return add_up({j: self.by_agent(j) for j in jobs})


def _listed(directory: Path) -> list[Path]:
    """The entries, sorted; none if `directory` does not exist. Raises OSError, where a glob of Python 3.13 finds nothing."""
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def sums_of(counters: Mapping[Any, Any]) -> dict[str, float]:
    """The valid counters of untrusted input: a client's, a file's or another node's."""
    found = {}
    for name in COUNTERS:
        amount = counters.get(name)
        if isinstance(amount, bool) or not isinstance(amount, (int, float)):
            continue
        if 0 <= amount < _LARGEST:  # neither is true of NaN
            found[name] = amount
    return found


def add_up(by_job: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """``{job: {agent: counters}}`` as one sum: jobs, number of agents, counters."""
    total: dict[str, float] = {}
    agents: set[str] = set()
    for by_agent in by_job.values():
        agents |= by_agent.keys()
        for sums in by_agent.values():
            for name, amount in sums_of(sums).items():
                total[name] = total.get(name, 0) + amount
    return {"jobs": sorted(by_job), "agents": len(agents), "counters": complete(total)}


def _read(path: Path) -> dict[str, float]:
    """The counters in a file; empty if it cannot be read or is malformed."""
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_FILE:
            return {}
        sums = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return sums_of(sums) if isinstance(sums, dict) else {}
