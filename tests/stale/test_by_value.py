"""Functions that launchers send by value, as Ray and submitit do: what runs is what was sent, whatever file lies there.

A driver pickles functions of ``__main__`` and of its project. A worker, a fresh process, runs them where the driver's files
are missing, are the same, or are another version; its own ``__main__`` has other things under the same names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.stale.by_value import DRIVER, NAMES, PROJECT, WORKER
from tests.support.processes import WITH_KCOORD
from tests.support.sandbox import Sandbox, finish, sandboxed

VERSIONS = ("version 1", "version 2")
LIES_THERE = ("missing", *VERSIONS)
Outcome = tuple[str, str, int]  # what the function writes, what is served, and how many compiles that took
Found = dict[str, list[dict[str, dict[str, Outcome]]]]
"""By what lies there: what each of two workers got, by version and name. Each runs both versions, the second the later first."""


def lay(home: Path, version: str) -> None:
    """The project of `version`, or none, where the driver had its own."""
    for name, text in (("project.py", PROJECT), ("other.py", PROJECT), ("driver.py", DRIVER)):
        if version != "missing":
            (home / name).write_text(text.replace("version 1", version))
        elif name == "other.py":
            (home / name).write_text(PROJECT)  # which is not sent
        else:
            (home / name).unlink(missing_ok=True)


def ran(box: Sandbox, *arguments: str | Path) -> str:
    done = finish(box.fork(*arguments, preload=WITH_KCOORD, PYTHONDONTWRITEBYTECODE="1"))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found() -> Iterator[Found]:
    with sandboxed() as box:
        home = box.root / "project"
        home.mkdir()
        for version in VERSIONS:
            lay(home, version)
            ran(box, home / "driver.py", box.root / version)
        results: Found = {}
        for there in LIES_THERE:
            lay(home, there)
            for sent in (VERSIONS, VERSIONS[::-1]):
                output = ran(box, "-c", WORKER, home, *(box.root / version for version in sent))
                tables = json.loads(output.splitlines()[-1])
                results.setdefault(there, []).append(dict(zip(sent, tables, strict=True)))
        yield results


@pytest.mark.parametrize("name", NAMES)
def test_a_worker_is_served_what_it_was_sent_and_a_second_one_compiles_nothing(name: str, found: Found) -> None:
    for there, workers in found.items():
        for worker in workers:
            for version in VERSIONS:
                true, served, _ = worker[version][name]
                assert served == true, (there, version)
        assert [workers[1][version][name][2] for version in VERSIONS] == [0, 0], there
        one, two = (workers[0][version][name][0] for version in VERSIONS)
        assert one != two or name == "a module that the worker imports", "nothing is shown by it"


def test_each_case_has_a_name_here(found: Found) -> None:
    for workers in found.values():
        assert [set(table) for worker in workers for table in worker.values()] == [set(NAMES)] * 4
