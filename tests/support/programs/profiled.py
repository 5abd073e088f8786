"""Importable compile functions for profiles; as a program, a rank: profiled.py use|warm|pairs [N]. Prints one JSON line."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import kcoord


@kcoord.compile_once(scope=kcoord.Scope.TARGET, ignore=["BEGUN", "SECONDS_EACH"])
def make(n: int, shape: tuple[int, ...] = (1, 2), *, staging: Path) -> None:
    if "BEGUN" in os.environ:
        Path(os.environ["BEGUN"]).touch()
    time.sleep(float(os.environ.get("SECONDS_EACH", "0.05")))
    (staging / "kernel").write_text(f"{n} {shape}")


@kcoord.compile_once(scope=kcoord.Scope.TARGET)
def make_for(n: int, *, staging: Path, target: kcoord.GPUTarget) -> None:
    (staging / "kernel").write_text(f"{n} for {target}")


def main(how: str, count: str = "8") -> None:
    import profiled  # as the job's own module: what is in __main__ cannot be imported

    report: Any = None
    if how == "warm":
        report = kcoord.warmup(os.environ["PROFILE"])
    elif how == "pairs":
        report = kcoord.warmup([(profiled.make, (n,)) for n in range(int(count))])
    texts = [(profiled.make(n).path / "kernel").read_text() for n in range(int(count))]
    coordinator = kcoord.connect()
    coordinator.close()
    line = {"texts": texts, "counters": coordinator.counters.read(), "report": vars(report) if report else None}
    sys.stdout.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    main(*sys.argv[1:])
