"""Two rounds of faults at random, and the proof that the judge of it can say no.

``CHAOS_SEED`` and ``CHAOS_SECONDS`` play another schedule, and a longer one; ``make chaos`` does it without pytest.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.chaos import judge, schedule
from tests.chaos.__main__ import available, run
from tests.chaos.compiler import compile_kernel, fault_of, key_of
from tests.chaos.judge import Verdict
from tests.chaos.kinds import KINDS, LEASE_LIMIT, LEASE_TTL
from tests.chaos.schedule import Fault, Kernel, Round
from tests.chaos.throw import Thrown

_SEED = os.environ.get("CHAOS_SEED", "kcoord")
_SECONDS = float(os.environ.get("CHAOS_SECONDS", "15"))


@pytest.mark.serial  # the judge bounds each single wait
@pytest.mark.timeout(_SECONDS + 400)
def test_whatever_is_thrown_every_rank_has_the_right_kernels_and_nothing_is_left(tmp_path: Path) -> None:
    report = run(_SEED, _SECONDS, available(), tmp_path)
    print(report.as_text())
    assert not report.as_json()["failed"], f"seed {_SEED}: make chaos SEED={_SEED}"


@pytest.mark.smoke
def test_a_seed_decides_a_round_and_another_seed_another() -> None:
    rounds = [schedule.draw("a", n) for n in range(50)]
    assert rounds == [schedule.draw("a", n) for n in range(50)]
    assert rounds != [schedule.draw("b", n) for n in range(50)]
    assert [Round.decode(r.encode()) for r in rounds] == rounds


def test_every_kind_of_fault_is_drawn() -> None:
    assert {f.kind for n in range(200) for f in schedule.draw("a", n).faults} == set(KINDS)


@pytest.mark.parametrize("harm", ["other kernel", "other writer", "torn", "missing"])
def test_a_kernel_that_is_not_what_one_compiler_wrote_is_found(tmp_path: Path, harm: str) -> None:
    key = key_of("a.0", Kernel("k1", 0.0, 300))
    compile_kernel(tmp_path, key, 300, 0.0)
    assert fault_of(tmp_path, key, 300) == ""
    if harm == "missing":
        (tmp_path / "last").unlink()
    elif harm == "other writer":
        (tmp_path / "last").write_text("another")
    elif harm == "torn":
        (tmp_path / "kernel.bin").write_bytes((tmp_path / "kernel.bin").read_bytes()[:-1])
    else:
        key = key_of("a.0", Kernel("k2", 0.0, 300))
    assert fault_of(tmp_path, key, 300)


def test_some_compiles_outlast_a_lease_and_some_its_limit_and_are_at_work_all_the_time() -> None:
    """Else nothing depends on renewals, on the limit, and on whoever looks at the clock for them: one that sleeps is seen to."""
    spinning = [k for n in range(50) for k in schedule.draw("a", n).kernels if k.spins]
    assert any(LEASE_TTL < k.seconds < LEASE_LIMIT and not k.hangs for k in spinning)
    assert any(k.hangs > LEASE_LIMIT for k in spinning)


def _compiled(node: int, rank: int, asked: float, until: float, how: str = "leads") -> judge.Told:
    facts: dict[str, Any] = {"kernel": "k0", "how": how, "note": "", "outcome": "ok", "took": 0.0}
    event = {"event": "compiled", "asked": asked, "t": until, **facts}
    return judge.Told(node, rank, [{**event, "event": "compiles", "t": asked}, event])


def _thrown(kind: str, began: float, ended: float, *, node: int = 0, rank: int = 0, kernel: int = 0) -> Thrown:
    return Thrown(Fault(0, 0.0, kind, node, rank, kernel, 0.0, "", 0), began, ended, met=True)


def _lasting(kind: str, seconds: float, node: int = 0) -> Thrown:
    return Thrown(Fault(0, 0.0, kind, node, 0, 0, seconds, "", 0), 100.0, 100.0 + seconds, met=True)


def _judged(told: list[judge.Told], *thrown: Thrown, seconds: float = 0.1) -> list[str]:
    round_ = Round("a", 0, "redis", "exec", (Kernel("k0", seconds, 300),), (), (), False)
    return judge.duplicates_without_reason(Verdict(round_, [], 0.0, list(thrown)), told)


def test_a_second_compile_needs_an_excuse() -> None:
    twice = [_compiled(0, 0, 100.0, 101.0), _compiled(1, 0, 102.0, 103.0)]
    assert _judged(twice[:1]) == []
    assert _judged(twice)
    assert _judged(twice, _thrown("redis-flush", 100.5, 100.5)) == []
    assert _judged(twice, _thrown("redis-flush", 50.0, 50.0)), "it was long ago"
    assert _judged(twice, _thrown("redis-flush", 200.0, 200.0)), "it came later"
    assert _judged(twice, _thrown("redis-script-flush", 100.5, 100.5)), "it excuses nothing"
    assert _judged(twice, _thrown("artifact-in-store", 101.5, 101.5, kernel=1)), "it was another kernel"
    assert _judged(twice, _thrown("rank-stop", 100.5, 102.0, rank=1)), "it was another rank"
    assert _judged([*twice, _compiled(1, 1, 102.0, 103.0)], _thrown("redis-flush", 100.5, 100.5)), "it excuses one"


def test_a_rank_that_stands_still_as_it_starts_the_agent_excuses_those_of_its_node_that_go_on_alone() -> None:
    others = [_compiled(1, 0, 100.0, 101.0), *(_compiled(0, rank, 103.0, 103.5, "alone") for rank in (0, 2, 3))]
    assert _judged(others, _thrown("rank-stop", 100.5, 102.0, node=0, rank=1)) == []
    assert _judged(others, _thrown("rank-stop", 100.5, 102.0, node=1, rank=1)), "it was on another node"


def test_a_compile_that_takes_long_excuses_a_hedge_and_no_second_leader() -> None:
    led, hedged = _compiled(0, 0, 100.0, 104.0), _compiled(1, 0, 101.5, 105.0, how="hedges")
    assert _judged([led, hedged], seconds=4.0) == []
    assert _judged([led, hedged]), "it was not slow"
    assert _judged([led, _compiled(1, 0, 103.0, 107.0)], seconds=4.0)
    assert _judged([led, hedged, _compiled(1, 1, 103.0, 107.0)], seconds=4.0)
    assert _judged([led, hedged, _compiled(0, 1, 103.0, 107.0, how="hedges")], seconds=4.0)


def test_a_wait_that_is_too_long_is_found_unless_the_rank_itself_stood_still() -> None:
    told = judge.Told(0, 0, [{"event": "served", "t": 150.0, "kernel": "k0", "asked": 100.0, "took": 50.0}])

    def waits(*thrown: Thrown) -> list[str]:
        round_ = Round("a", 0, "redis", "exec", (Kernel("k0", 0.1, 300),), (), (), False)
        return judge.waits_too_long(Verdict(round_, [], 0.0, list(thrown)), [told])

    assert waits()
    assert waits(_thrown("rank-stop", 100.0, 110.0))
    assert waits(_thrown("rank-stop", 100.0, 130.0), _thrown("rank-stop", 120.0, 148.0)) == []
    assert waits(_thrown("rank-stop", 100.0, 140.0, rank=1))


def test_a_wait_needs_an_excuse() -> None:
    told = judge.Told(0, 0, [{"event": "served", "t": 108.0, "kernel": "k0", "asked": 100.0, "took": 8.0}])

    def waits(*thrown: Thrown) -> list[str]:
        round_ = Round("a", 0, "redis", "exec", (Kernel("k0", 0.1, 300),), (), (), False)
        return judge.waits_too_long(Verdict(round_, [], 0.0, list(thrown)), [told])

    assert waits()
    assert waits(_thrown("redis-kill", 50.0, 60.0)), "it was long ago"
    assert waits(_thrown("redis-kill", 109.0, 110.0)), "it came later"
    assert waits(_thrown("redis-kill", 101.0, 103.0)) == []


def test_a_fault_that_lasts_excuses_a_wait_only_until_it_must_have_been_noticed() -> None:
    def waits(took: float, *thrown: Thrown, starts: bool = False) -> list[str]:
        before = {"event": "served", "t": 99.0, "kernel": "k0", "asked": 99.0, "took": 0.0}
        now = {"event": "served", "t": 100.0 + took, "kernel": "k0", "asked": 100.0, "took": took}
        told = judge.Told(0, 0, [now] if starts else [before, now])
        round_ = Round("a", 0, "redis", "exec", (Kernel("k0", 0.1, 300),), (), (), False)
        return judge.waits_too_long(Verdict(round_, [], 0.0, list(thrown)), [told])

    agent, redis = _lasting("agent-hang", 14.0), _lasting("redis-hang", 17.0)
    assert waits(5.0, agent) == []
    assert waits(6.0, agent), "KCOORD_AGENT_TIMEOUT is over"
    assert waits(6.0, agent, starts=True) == [], "the rank may have begun to start this agent"
    assert waits(20.0, agent, starts=True)
    assert waits(6.0, _lasting("agent-hang", 14.0, node=1)) == [], "its lease must end first"
    assert waits(8.0, _lasting("agent-hang", 14.0, node=1))
    assert waits(10.0, redis) == []
    assert waits(11.0, redis)


def test_a_traceback_in_a_log_is_found_unless_it_was_ordered() -> None:
    ordered = 'Traceback (most recent call last):\n  File "x"\ntests.chaos.rank.OrderedToRaise: as ordered\n'
    other = 'Traceback (most recent call last):\n  File "x"\nValueError: 7\n'
    assert not [p for p in judge.without_ordered("kcoord: hm\n" + ordered + "kcoord: hm\n") if judge.ALARMING.search(p)]
    assert [p for p in judge.without_ordered(ordered + other + ordered) if judge.ALARMING.search(p)]
