"""Random programs: two that have one key have one output, whatever else ran before in their processes."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.stale.random_programs import families
from tests.stale.worlds import together
from tests.support.fuzzing import LONG, is_long
from tests.support.processes import WITH_KCOORD
from tests.support.sandbox import Sandbox, finish, sandboxed

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(900)]
FAMILIES = 30


@pytest.fixture(scope="module")
def seed() -> int:
    """The same programs each time; ``make fuzz`` draws others."""
    return random.SystemRandom().randrange(1 << 32) if is_long() else 12


@pytest.fixture(scope="module")
def runs(seed: int) -> Iterator[list[list[dict[str, Any]]]]:
    """What two processes found, of which one goes through the programs backwards."""
    count = FAMILIES * (LONG if is_long() else 1)
    with sandboxed() as box:
        yield together(*(lambda order=order: ran(box, seed, count, order) for order in ("forth", "back")))


def ran(box: Sandbox, seed: int, count: int, order: str) -> list[dict[str, Any]]:
    home = box.root / order
    home.mkdir()
    root = str(Path(__file__).parents[2])
    arguments = ("-m", "tests.stale.random_programs", seed, count, order, home)
    done = finish(box.fork(*arguments, preload=WITH_KCOORD, PYTHONPATH=root), timeout=600)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_programs_of_one_key_have_one_output(seed: int, runs: list[list[dict[str, Any]]]) -> None:
    outputs: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for state in (state for run in runs for state in run if "key" in state):
        outputs[state["key"]][state["output"]].append(state["name"])
    mixed = [dict(each) for each in outputs.values() if len(each) > 1]
    assert not mixed, f"seed {seed}: {len(mixed)} keys, such as\n{shown(seed, mixed[0])}"


def test_a_program_has_the_same_key_in_each_process(seed: int, runs: list[list[dict[str, Any]]]) -> None:
    """But for one whose code names a file that is another's: that may have its very text, by what ran before."""
    forth, back = ({state["name"]: state for state in run if "foreign" not in state["ways"]} for run in runs)
    differ = [name for name in forth if forth[name] != back[name]]
    assert not differ, f"seed {seed}: {len(differ)} programs, such as {forth[differ[0]]} and {back[differ[0]]}"


def test_a_refusal_is_one_of_values_and_is_rare(runs: list[list[dict[str, Any]]]) -> None:
    errors = [state["error"] for state in runs[0] if "error" in state]
    assert [each for each in errors if not each.startswith("KeyFactorError: ")] == []
    assert len(errors) < len(runs[0]) / 2


def test_the_programs_differ_in_what_they_write(runs: list[list[dict[str, Any]]]) -> None:
    """Else nothing is shown by them."""
    outputs = {state["output"] for state in runs[0]}
    assert len(outputs) > len(runs[0]) / 20
    assert sum("Error(" in each for each in outputs) < len(outputs) / 4


def shown(seed: int, outputs: dict[str, list[str]]) -> str:
    """The first program of each output."""
    wanted = {names[0].split()[0]: (output, names[0]) for output, names in outputs.items()}
    count = 1 + max(int(name.partition(".")[0]) for name in wanted)
    lines = []
    for each in families(seed, count):
        if each.name in wanted:
            lines += [
                *wanted[each.name],
                *(f"{way}: {text}" for way, text in (*each.kits, each.subject)),
                *each.changes,
            ]
    return "\n".join(lines)
