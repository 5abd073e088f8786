"""``python -m tests.newest``: tests of each compiler on the releases of ``newest.toml``, each on top of this environment.

A release is hooked and tried first, in a process of its own, so that a hook that does not fit fails within seconds. A part that
kcoord stands aside from is a failure, and so is a test that is skipped since something is not installed. A release that cannot be
installed, or for which no time is left, is named and is no failure. Exit code 1 if a release failed.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import signal
import subprocess
import sys
import sysconfig
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from kcoord.backends import trials
from kcoord.backends.registry import compilers

ROOT = Path(__file__).resolve().parents[1]
NEWEST_OF_INDEX = ""
_PLACES = Path(sys.prefix) / "newest"
_TO_END = 20.0  # seconds in which an interrupted pytest ends its processes
_NOT_INSTALLED = re.compile(r"Skipped: ((?:needs|could not import) [^\n\"]*)")
"""Why tests are skipped where something is not installed: a test's own reason, or in the text of a file's."""


class TimeIsUp(Exception):
    pass


@dataclass(frozen=True)
class Tested:
    """One compiler of the table. `releases` ascend."""

    compiler: str
    package: str
    releases: tuple[str, ...]
    tests: tuple[str, ...]

    @property
    def modules(self) -> list[str]:
        return next(list(each.modules) for each in compilers() if each.name == self.compiler)

    def turns(self, of_index: bool) -> Iterator[str]:
        """The releases, the newest first and then the oldest: time may be short."""
        yield NEWEST_OF_INDEX if of_index else self.releases[-1]
        yield from self.releases[:-1]


@dataclass(frozen=True)
class Outcome:
    compiler: str
    release: str
    found: str
    failed: bool = False


def table() -> list[Tested]:
    content = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return [
        Tested(name, each["package"], tuple(each["releases"]), tuple(each["tests"])) for name, each in content.items()
    ]


def outcome(tested: Tested, release: str, until: float, arguments: Sequence[str]) -> Outcome:
    """Install `release`, hook it, and run the compiler's tests with pytest's `arguments`, until the monotonic time `until`."""
    try:
        place = _PLACES / f"{tested.compiler}-{release or 'index'}"
        python = str(place / "bin" / "python")
        if why := _not_installed(tested, release, place, python, until):
            return Outcome(tested.compiler, release or "newest", f"could not be installed: {why}")
        release = _said(
            python, f"from importlib.metadata import version; print(version({tested.package.partition('[')[0]!r}))"
        )
        examined = trials.examine(tested.compiler, tested.modules, python)
        if examined.faults:
            found = "; ".join(f"{what}: {fault}" for what, fault in examined.faults)
            return Outcome(tested.compiler, release, found, failed=True)
        trial = "" if examined.seconds is None else f": its trial took {examined.seconds:.1f} s"
        print(f"== {tested.compiler} {release}{trial}", flush=True)
        results = place / "results.xml"
        results.unlink(missing_ok=True)
        command = [python, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadgroup", f"--junitxml={results}"]
        code = _run([*command, *tested.tests, *arguments], until)
        found, failed = _read(results)
        found = found if code is not None else f"{found}, no time was left for the others"
        return Outcome(tested.compiler, release, found, failed or bool(code))
    except TimeIsUp:
        return Outcome(tested.compiler, release or "newest", "no time was left")


def _not_installed(tested: Tested, release: str, place: Path, python: str, until: float) -> str:
    """The reason, in pip's words; empty if `release` is installed in the environment `place`, above this one."""
    subprocess.run([sys.executable, "-m", "venv", place], check=True, timeout=_left(until))
    (site,) = place.glob("lib/python*/site-packages")
    below = sysconfig.get_path("purelib")
    (site / "below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    requirement = f"{tested.package}=={release}" if release else tested.package
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--upgrade", requirement]
    try:
        done = subprocess.run(pip, stderr=subprocess.PIPE, text=True, timeout=_left(until))
    except subprocess.TimeoutExpired:
        raise TimeIsUp from None
    return "" if done.returncode == 0 else done.stderr.strip().rpartition("\n")[2]


def _left(until: float) -> float:
    left = until - time.monotonic()
    if left <= 0:
        raise TimeIsUp
    return left


def _said(python: str, code: str) -> str:
    return subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def _run(command: Sequence[str], until: float) -> int | None:
    """The exit code; None if time is up, and pytest was interrupted as by a person: its results are those of the tests so far."""
    with subprocess.Popen(command, cwd=ROOT) as process:
        try:
            return process.wait(_left(until))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_TO_END)
            process.kill()
            return None


def _read(results: Path) -> tuple[str, bool]:
    """The words for pytest's results, and True if they are a failure."""
    if not results.exists():
        return "pytest ended without results", True
    cases = list(ElementTree.parse(results).iter("testcase"))
    failed = [each for each in cases if each.find("failure") is not None or each.find("error") is not None]
    reasons = [f"Skipped: {each.get('message')}\n{each.text}" for case in cases for each in case.iter("skipped")]
    missing = sorted({why for each in reasons for why in _NOT_INSTALLED.findall(each)})
    found = [f"{len(failed)} failed"] if failed else []
    found += [f"{len(cases) - len(failed) - len(reasons)} passed"]
    found += [f"{len(reasons)} skipped"] if reasons else []
    found += [f"a test {each}" for each in missing]
    found += [f"{each.get('classname')}::{each.get('name')}" for each in failed[:3]]
    return ", ".join(found), bool(failed or missing)


def main() -> int:
    every = table()
    parser = argparse.ArgumentParser(prog="python -m tests.newest")
    parser.add_argument("--compiler", choices=[each.compiler for each in every], help="this one alone")
    parser.add_argument("--turn", type=int, help="one compiler alone: the one whose turn it is, by a number that grows")
    parser.add_argument("--index", action="store_true", help="the newest release of the index, not that of the table")
    parser.add_argument("--seconds", type=float, default=86_400.0, help="the time for all of it")
    parser.add_argument("arguments", nargs="*", help="pytest's, after --")
    given = parser.parse_args()
    chosen = [each for each in every if given.compiler in (None, each.compiler)]
    chosen = chosen if given.turn is None else [chosen[given.turn % len(chosen)]]
    until = time.monotonic() + given.seconds - _TO_END
    found = [outcome(each, release, until, given.arguments) for each in chosen for release in each.turns(given.index)]
    print()
    for each in found:
        print(f"{each.compiler:12} {each.release:14} {'FAILED: ' if each.failed else ''}{each.found}", flush=True)
    return any(each.failed for each in found)


if __name__ == "__main__":
    sys.exit(main())
