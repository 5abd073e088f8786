"""Measurements that the ranks of a node share out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kcoord.agent.autotuning import SharedMeasurements
from kcoord.errors import ProtocolError
from kcoord.protocol.messages import Measure, Measurements

A, B = "a" * 64, "b" * 64


def asked(
    shared: SharedMeasurements, process: int, index: int | None = None, digest: str = A, count: int = 3
) -> Measurements:
    """`process` has measured `index`, and asks for the next."""
    timing = None if index is None else b"%d" % index
    return shared.measure(client(process, process), 0, Measure(digest, count, index, timing))


def client(seen: int, own: int) -> Any:
    """The connection of a process, by the id that the agent sees and its own."""
    return SimpleNamespace(pid=seen, who=SimpleNamespace(pid=own))


def test_each_rank_gets_what_no_other_measures_and_in_the_end_all_measurements() -> None:
    shared = SharedMeasurements()
    assert [asked(shared, process).next for process in (1, 2)] == [0, 1]
    assert asked(shared, 2, 1).next == 2
    assert asked(shared, 1, 0).next == 2, "nobody waits for the other"
    for process in (2, 1):
        assert asked(shared, process, 2) == Measurements(timings=[b"0", b"1", b"2"])


def test_of_too_many_configurations_each_rank_measures_all() -> None:
    assert asked(SharedMeasurements(), 1, count=1001) == Measurements()


def test_ranks_in_containers_whose_ids_the_agent_cannot_see_are_several() -> None:
    shared = SharedMeasurements()
    for own in (1, 2):
        assert shared.measure(client(0, own), 0, Measure(A, 1)).next == 0
    for own in (1, 2):
        assert shared.measure(client(0, own), 0, Measure(A, 1, 0, b"0")).timings == [b"0"]


def test_keys_are_apart() -> None:
    shared = SharedMeasurements()
    assert [asked(shared, 1).next, asked(shared, 1, digest=B).next] == [0, 0]


def test_once_every_rank_has_them_measurements_are_forgotten() -> None:
    """A choice that is made again is measured again."""
    shared = SharedMeasurements()
    assert asked(shared, 1, count=1).next == 0
    assert asked(shared, 1, 0, count=1).timings == [b"0"]
    assert asked(shared, 1, count=1).next == 0


def test_tunings_that_nobody_finished_are_bounded() -> None:
    shared = SharedMeasurements(most=1)
    assert asked(shared, 1).next == 0
    assert asked(shared, 1, digest=B).next == 0
    assert asked(shared, 2).next == 0, "the older one is forgotten"


@pytest.mark.parametrize("bad", [{"count": 0}, {"index": -1}, {"index": 3}, {"timing": b"x" * 1001}], ids=str)
def test_what_no_autotuner_asks_is_refused(bad: dict[str, int]) -> None:
    with pytest.raises(ProtocolError):
        SharedMeasurements().measure(
            client(1, 1), 0, Measure(**{"digest": A, "count": 3, "index": 0, "timing": b"", **bad})
        )
