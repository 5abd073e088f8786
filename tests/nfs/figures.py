"""What the tests on NFS measured: a table, written to ``NFS_RESULTS=FILE`` at the end of the run."""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.result import machine

_VERSIONS = {"v3": "NFS v3", "v4": "NFS v4.1"}


@dataclass
class Figures:
    """`note` adds a figure. Rows keep the order in which they came first."""

    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    rig: str = ""

    def note(self, row: str, version: str, text: str) -> None:
        self.rows.setdefault(row, {})[version] = text

    def text(self) -> str:
        lines = ["# Faults and waits on a real NFS server", "", "| what | " + " | ".join(_VERSIONS.values()) + " |"]
        lines += ["| --- " * (len(_VERSIONS) + 1) + "|"]
        lines += [
            "| " + " | ".join([row, *(cells.get(v, "") for v in _VERSIONS)]) + " |" for row, cells in self.rows.items()
        ]
        lines += ["", f"- Rig: {self.rig}", "- Command: `make nfs`"]
        return "\n".join([*lines, f"- Machine: {machine()}", f"- Date: {time.strftime('%Y-%m-%d')}", ""])

    def save(self, *, whole: bool) -> None:
        """Beside the file if a test has failed."""
        if name := os.environ.get("NFS_RESULTS"):
            Path(name if whole else f"{name}.failed").write_text(self.text())


def spread(seconds: list[float]) -> str:
    """Median and worst."""
    return f"{_short(statistics.median(seconds))} (worst {_short(max(seconds))})"


def _short(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
