"""``kcoord report JOB OTHER``: a run compared with an earlier one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.cli.report import new_lines
from kcoord.keys.cache_key import CacheKey
from kcoord.report.comparison import Comparison, compare
from kcoord.report.findings import findings_of
from kcoord.report.timeline import Row, Timeline
from kcoord.telemetry.spans import KEY_DIGITS, Process, Span
from tests.support.command import kcoord as run
from tests.support.pages import Text, make, save
from tests.support.sandbox import Sandbox, eventually


def key(name: str = "matmul", **factors: Any) -> CacheKey:
    return CacheKey.of("test", name, **{"constants": {"BLOCK": 64}, **factors})


def span(kind: str, of: CacheKey, begin: float = 0.0, seconds: float = 1.0, **more: Any) -> Span:
    """As it is read from a file."""
    made = Span(kind, "ok", of.backend, of.name, of.digest[:KEY_DIGITS], 1.7e9 + begin, seconds, **more)
    return Span.from_wire(made.to_wire())


def timeline(job: str, *spans: Span) -> Timeline:
    return Timeline(job, [Row(Process("n", 100, 0), list(spans))])


def manifests(keys: Iterable[CacheKey], created: float = 0.0) -> list[Manifest]:
    """As they are read from a disk: with their details packed."""
    return [Manifest.decode(Manifest(k, (), 1.0, Origin(created=created)).encode()) for k in keys]


def compared(before: Timeline, after: Timeline, known: list[Manifest]) -> Comparison:
    return compare(before, after, findings_of(after), known)


def test_new_keys_are_grouped_by_the_factors_that_differ_from_the_earlier_run() -> None:
    old = [key(name, version="3.4") for name in "abc"]
    new = [key(name, version="3.5") for name in "abc"]
    before = timeline("a", *(span("compile", k) for k in old))
    found = compared(before, timeline("b", *(span("compile", k) for k in new)), manifests(old + new))
    (reason,) = found.new
    assert reason.differences == (("version", "3.4", "3.5"),)
    assert sorted(k.name for k in reason.kernels) == ["a", "b", "c"]
    assert next(new_lines(found.new)).startswith("3 new keys: version: 3.4 → 3.5: a ")


def test_a_key_that_one_run_only_loaded_or_that_is_no_kernel_of_the_job_is_not_new() -> None:
    before = timeline("a", span("compile", key()))
    after = timeline("b", span("load", key(), saved=1.0), span("compile", key("other"), aside=True))
    assert compared(before, after, manifests([key()])).new == []


def test_a_new_key_is_compared_with_the_nearest_of_the_earlier_runs_keys_also_if_it_was_made_later() -> None:
    earlier, others, mine = key(warps=4, stages=2), key(warps=8, stages=3), key(warps=8, stages=2)
    known = [*manifests([others, mine], created=5.0), *manifests([earlier], created=9.0)]
    found = compared(timeline("a", span("load", earlier)), timeline("b", span("load", mine)), known)
    assert [miss.differences for miss in found.new] == [(("warps", "4", "8"),)]


def test_a_new_key_without_a_known_relative_says_why() -> None:
    before = timeline("a", *(span("compile", key(name, n=1)) for name in ("lost", "unknown")))
    after = timeline("b", *(span("compile", k) for k in (key("fresh"), key("lost", n=2), key("unknown", n=2))))
    found = compared(before, after, manifests([key("fresh"), key("lost", n=2), key("unknown", n=1)]))
    assert {miss.reason: [k.name for k in miss.kernels] for miss in found.new} == {
        "the earlier run asked for no kernel of this name": ["fresh"],
        "the earlier run asked for other keys of this name; it is not known which factors differ": ["lost", "unknown"],
    }


def test_the_sums_of_both_runs_are_those_of_their_reports() -> None:
    spans = [span("compile", key("a"), 0, 2.0), span("wait", key("b"), 2.0, 1.0), span("load", key("b"), 3.0)]
    after = timeline("b", span("load", key("a"), 0, 1.0, saved=2.0), span("load", key("b"), 1000, 1.0, saved=2.0))
    found = compared(timeline("a", *spans), after, [])
    assert found.sums == {
        "ranks": (1, 1), "kernels": (2, 2), "compiled": (1, 0), "compile_seconds": (2.0, 0), "loads": (1, 2),
        "wait_seconds": (1.0, 0), "first_steps_seconds": (4.0, 1.0),
    }  # fmt: skip
    assert ("compile seconds", "2.00 s", "0 ms") in found.texts()


def test_a_run_is_compared_with_an_earlier_one_on_the_terminal_the_page_and_as_json(sandbox: Sandbox) -> None:
    make(sandbox, "first", options={"warps": 4}, block=64)
    make(sandbox, "first", "gone")
    make(sandbox, "second", options={"warps": 8}, block=64)
    make(sandbox, "second", "fresh")

    def facts() -> dict[str, Any]:
        document: dict[str, Any] = json.loads(run(sandbox, "report", "first", "second", "--json").stdout)
        assert document["job"] == "second"
        found: dict[str, Any] = document["comparison"]
        return found

    eventually(lambda: facts()["sums"]["kernels"] == [2, 2])
    found = facts()
    assert found["job"] == "first"
    assert {r["kernels"][0]: r["differences"] for r in found["new"]} == {
        "scale": [["options warps", "4", "8"]],
        "fresh": [],
    }
    told = run(sandbox, "report", "first", "second").stdout
    assert told.startswith("kcoord-second.html: job second, 2 compiles")
    assert "compared with job first:" in told
    assert "  1 new key: options warps: 4 → 8: scale " in told
    assert "  1 new key: the earlier run asked for no kernel of this name: fresh " in told
    seen = Text((sandbox.root / "kcoord-second.html").read_text()).text
    assert "Compared with job first" in seen
    assert "options warps 4 8" in seen
    assert "Compared with" not in run(sandbox, "report", "second", "-o", "-").stdout
    assert "comparison" not in json.loads(run(sandbox, "report", "second", "--json").stdout)


def test_a_comparison_that_cannot_be_made_is_one_line_with_the_remedy(sandbox: Sandbox) -> None:
    save(sandbox.local, "a", "n", {0: [span("compile", key())]})
    save(sandbox.local, "b", "n", {0: [span("compile", key(), 100)]})
    for jobs in (("a", "nothing"), ("nothing", "a")):
        told = run(sandbox, "report", *jobs, code=1).stderr
        assert told == "kcoord: there is no time line of job 'nothing'; these jobs have one: b, a\n"
    assert "JOB and OTHER are one job" in run(sandbox, "report", "a", "a", code=2).stderr
    assert run(sandbox, "report", "a", "b").stderr == ""


def test_problems_of_the_earlier_run_are_told_with_its_name(sandbox: Sandbox) -> None:
    save(sandbox.local, "a", "n", {0: [span("compile", key())]})
    save(sandbox.local, "a", "m", {}).write_bytes(b"no time line")
    save(sandbox.local, "b", "n", {0: [span("compile", key(), 100)]})
    assert "kcoord: not read: job a: " in run(sandbox, "report", "a", "b").stderr
