"""A benchmark's result: a table with the command, the machine in words and the date."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

RESULTS = Path(__file__).parent / "results"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Result:
    """`rows` under `columns`; `notes` explain the comparison and the figures."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        lines = [f"# {self.title}", "", _row(self.columns), _row(["---"] * len(self.columns))]
        lines += [_row(row) for row in self.rows]
        lines += ["", *(f"- {note}" for note in self.notes), f"- Command: `{_command()}`"]
        return "\n".join([*lines, f"- Machine: {machine()}", f"- Date: {time.strftime('%Y-%m-%d')}", ""])

    def save(self, name: str) -> None:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(self.text())


def figures(name: str, command: list[str], variables: dict[str, str], timeout: float) -> dict[str, Any]:
    """The line of JSON, ``{"wall": …}``, that a benchmark's job prints. Ends the benchmark `name` if it prints none."""
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, timeout=timeout)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"wall"')]
    if done.returncode or not lines:
        raise SystemExit(f"benchmark {name}: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def adopt_orphans() -> None:
    """Make this process the parent of its descendants that lose theirs, as pools do: then they can be counted."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _command() -> str:
    arguments = [a for a in sys.argv[1:] if a != "--save"]
    return " ".join(["python -m benchmarks", *arguments])


def machine() -> str:
    """This machine in words: cores, processor, memory, GPUs, versions."""
    words = [f"{len(os.sched_getaffinity(0))} cores ({_processor()})", f"{psutil.virtual_memory().total >> 30} GiB"]
    words += _gpus()
    words.append(f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}")
    for package in ("torch", "triton", "redis"):
        try:
            words.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(words)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    count = torch.cuda.device_count()
    return [f"{count} × {torch.cuda.get_device_name(0)}"] if count else []


def spread(milliseconds: list[float]) -> list[str]:
    """Median, 90th percentile and maximum, in milliseconds."""
    ordered = sorted(milliseconds)
    return [f"{ordered[int(len(ordered) * q)]:.2f}" for q in (0.5, 0.9)] + [f"{ordered[-1]:.2f}"]
