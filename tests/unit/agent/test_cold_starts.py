"""The cold start of a job: until its last new kernel, and what compiling and waiting took of it."""

from __future__ import annotations

from kcoord.agent import cold_starts
from kcoord.agent.cold_starts import ColdStarts
from kcoord.protocol.identity import Identity
from kcoord.telemetry.spans import Span


def span(kind: str, begin: float, seconds: float) -> Span:
    return Span(kind, "ok", "triton", "kernel", "ab", begin, seconds)


def rank(pid: int, job: str = "job") -> Identity:
    return Identity(pid, pid, pid, job)


def test_it_ends_with_the_last_new_kernel_and_the_slowest_rank_counts() -> None:
    starts = ColdStarts()
    starts.add(rank(1), [span("compile", 100.0, 2.0), span("wait", 103.0, 1.0), span("load", 500.0, 9.0)])
    starts.add(rank(2), [span("wait", 101.0, 0.5)])
    assert starts.of("job") == {"ended": 104.0, "seconds": 3.0}


def test_a_job_that_has_all_its_kernels_has_no_cold_start() -> None:
    starts = ColdStarts()
    starts.add(rank(1), [span("load", 1.0, 1.0)])
    assert starts.of("job") is starts.of(None) is None


def test_a_kernel_that_is_new_an_hour_later_belongs_to_no_cold_start() -> None:
    starts = ColdStarts()
    starts.add(rank(1), [span("compile", 100.0, 1.0), span("compile", 3700.0, 1.0)])
    assert starts.of("job") == {"ended": 101.0, "seconds": 1.0}


def test_only_so_many_jobs_are_remembered() -> None:
    starts = ColdStarts()
    for number in range(cold_starts._MOST_JOBS + 1):
        starts.add(rank(1, f"job {number}"), [span("compile", 1.0, 1.0)])
    assert starts.of("job 0") is None
    assert starts.of("job 1") is not None
