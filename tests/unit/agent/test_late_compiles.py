"""A long compile in the middle of a job is told, since other ranks may wait for it in a collective."""

from __future__ import annotations

from kcoord.agent.late_compiles import LateCompiles


def test_a_long_compile_after_a_quiet_time_is_told_once_a_job() -> None:
    late, compile = LateCompiles(10.0, 20.0), ("j", "rank 3", "triton:add", 1030.0)
    last = {"j": 1000.0, "other": 1025.0}
    assert late.look([compile], lambda job: last.get(job, 0.0), 1039.0) == [], "it is short"
    assert late.look([compile], lambda job: last.get(job, 0.0), 1041.0) == [
        "rank 3 compiles triton:add since 11 s, 30 s after the last kernel: other ranks may be waiting for it in a collective"
    ]
    assert late.look([compile], lambda job: last.get(job, 0.0), 1050.0) == []


def test_a_compile_at_the_start_of_a_job_is_not_told() -> None:
    late = LateCompiles(10.0, 20.0)
    assert (
        late.look(
            [("new", "rank 0", "k", 1000.0), ("other", "rank 0", "k", 1000.0)], {"new": 0.0, "other": 990.0}.get, 1100.0
        )
        == []
    )
