"""Inductor's choices to pad matrix products, of processes with an agent in common and a cache of torch's each."""

from __future__ import annotations

import json

import pytest

from tests.support.sandbox import Sandbox

pytest.importorskip("torch")

ASKED = """
import json, sys
import kcoord
kcoord.install()
from torch._inductor import config
from torch._inductor.fx_passes import pad_mm
config.deterministic = "deterministic" in sys.argv
found = {}
for product, times in json.loads(sys.argv[1]).items():
    before = pad_mm.get_cached_should_pad(product) if product != "at once" else None
    measured = pad_mm.is_padded_faster(product, *times) if times else None
    found[product] = [before, measured, pad_mm.get_cached_should_pad(product)]
print(json.dumps(found))
"""
FASTER, SLOWER = [2.0, 1.0], [1.0, 2.0]  # milliseconds of a product as it is, and padded


def process(
    box: Sandbox, cache: str, measured: dict[str, list[float]], *how: str, **variables: str
) -> dict[str, list[bool | None]]:
    """By product, what torch knows before it measures, its choice, and what it knows afterwards."""
    place = str(box.root / cache)
    done = box.run_forked("-c", ASKED, json.dumps(measured), *how, TORCHINDUCTOR_CACHE_DIR=place, **variables)
    assert done.returncode == 0, done.stderr
    assert "kcoord" not in done.stderr
    found: dict[str, list[bool | None]] = json.loads(done.stdout)
    return found


def test_the_first_rank_that_has_measured_decides_for_all_whatever_they_measure(sandbox: Sandbox) -> None:
    first = {"a": [None, True, True], "b": [None, False, False]}
    assert process(sandbox, "first", {"a": FASTER, "b": SLOWER}) == first
    others = {"a": [True, True, True], "b": [False, False, False]}
    assert process(sandbox, "second", {"a": SLOWER, "b": FASTER}) == others
    assert process(sandbox, "third", {"a": [], "b": []}) == {"a": [True, None, True], "b": [False, None, False]}


def test_ranks_that_measure_at_the_same_time_choose_alike(sandbox: Sandbox) -> None:
    """The second one had found no choice before it measured."""
    assert process(sandbox, "first", {"at once": FASTER}) == {"at once": [None, True, True]}
    assert process(sandbox, "second", {"at once": SLOWER}) == {"at once": [None, True, True]}


def test_a_choice_that_torch_has_kept_from_before_is_offered_and_gives_way_to_an_earlier_one(sandbox: Sandbox) -> None:
    for cache, times in (("first", FASTER), ("second", SLOWER)):
        process(sandbox, cache, {"a": times}, KCOORD_DISABLE="1")
    assert process(sandbox, "first", {"a": []}) == {"a": [True, None, True]}
    assert process(sandbox, "second", {"a": []}) == {"a": [True, None, True]}
    assert process(sandbox, "third", {"a": []}) == {"a": [True, None, True]}


def test_a_deterministic_process_takes_no_choice_that_was_made_by_time(sandbox: Sandbox) -> None:
    process(sandbox, "first", {"a": FASTER})
    assert process(sandbox, "second", {"a": []}, "deterministic") == {"a": [None, None, None]}


def test_a_process_without_kcoord_has_its_own_choice(sandbox: Sandbox) -> None:
    process(sandbox, "first", {"a": FASTER})
    assert process(sandbox, "second", {"a": SLOWER}, KCOORD_DISABLE="1") == {"a": [None, False, False]}
