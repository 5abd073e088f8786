"""``kcoord report JOB OTHER``: a run compared with an earlier one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.cli.comparison import comparison_lines
from kcoord.keys.cache_key import CacheKey
from kcoord.report.comparison import Comparison, compare
from kcoord.report.findings import findings_of
from kcoord.report.page import page
from kcoord.report.timeline import Row, Timeline
from kcoord.telemetry.spans import KEY_DIGITS, Process, Span
from tests.support.command import kcoord as run
from tests.support.pages import HOSTILE, Text, make, save
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


def compared(before: Timeline, after: Timeline, known: list[Manifest] | None) -> Comparison:
    return compare(before, after, findings_of(after), known)


def names(comparison: Comparison) -> dict[str, list[str]]:
    return {miss.reason: [k.name for k in miss.kernels] for miss in comparison.new}


# Keys that are new, and keys that are gone


def test_new_keys_are_grouped_by_the_factors_that_differ_from_the_earlier_run() -> None:
    old = [key(name, version="3.4") for name in "abc"]
    new = [key(name, version="3.5") for name in "abc"]
    before = timeline("a", *(span("compile", k) for k in old))
    after = timeline("b", *(span("compile", k, seconds=1.01) for k in new))
    found = compared(before, after, manifests(old + new))
    (reason,) = found.new
    assert reason.differences == (("version", "3.4", "3.5"),)
    assert sorted(k.name for k in reason.kernels) == ["a", "b", "c"]
    assert sorted(k.name for k in found.gone) == ["a", "b", "c"]
    assert "  3 keys: version: 3.4 → 3.5: a " in "\n".join(comparison_lines(found))


def test_a_key_of_both_runs_is_neither_new_nor_gone_even_if_one_run_only_loaded_it() -> None:
    before, after = timeline("a", span("compile", key())), timeline("b", span("load", key(), saved=1.0))
    found = compared(before, after, manifests([key()]))
    assert (found.new, found.gone, found.slower) == ((), (), ())


def test_a_new_key_is_compared_with_keys_of_the_earlier_run_alone_also_if_they_were_made_later() -> None:
    earlier, others, mine = key(warps=4, stages=2), key(warps=8, stages=3), key(warps=8, stages=2)
    known = [*manifests([others, mine], created=5.0), *manifests([earlier], created=9.0)]
    found = compared(timeline("a", span("load", earlier)), timeline("b", span("load", mine)), known)
    assert [miss.differences for miss in found.new] == [(("warps", "4", "8"),)]


def test_the_nearest_of_several_variants_explains_a_new_key() -> None:
    variants = [key(constants={"BLOCK": block, "EVEN": even}) for block in (64, 128) for even in (0, 1)]
    mine = key(constants={"BLOCK": 128, "EVEN": 1}, warps=8)
    before = timeline("a", *(span("compile", k) for k in variants))
    found = compared(before, timeline("b", span("compile", mine)), manifests([*variants, mine]))
    assert [miss.differences for miss in found.new] == [(("warps", "unset", "8"),)]


def test_a_new_key_without_a_known_relative_says_why() -> None:
    first, lost, mine = key("other"), key("lost", n=1), key("lost", n=2)
    unknown, known = key("unknown", n=1), key("unknown", n=2)
    before = timeline("a", *(span("compile", k) for k in (first, lost, unknown)))
    after = timeline("b", *(span("compile", k) for k in (key("fresh"), mine, known)))
    found = names(compared(before, after, manifests([first, key("fresh"), mine, unknown])))
    assert found == {
        "the earlier run asked for no kernel of this name": ["fresh"],
        "the earlier run's artifacts of this kernel are gone, so the reason is unknown": ["lost"],
        "their artifacts are neither in the store nor on this node, so the reason is unknown": ["unknown"],
    }


def test_a_key_that_is_no_kernel_of_the_job_is_not_compared() -> None:
    aside = [span("compile", key(name), aside=True) for name in ("old", "new")]
    found = compared(timeline("a", aside[0]), timeline("b", aside[1]), [])
    assert (found.new, found.gone) == ((), ())


# Slower, and the sums


def slower(before: list[Span], after: list[Span], known: Iterable[CacheKey] = ()) -> list[tuple[str, float, float]]:
    found = compared(timeline("a", *before), timeline("b", *after), manifests(known)).slower
    return [(s.kernel.name, s.before.one_compile, s.kernel.one_compile) for s in found]


def test_kernels_that_take_longer_to_compile_come_with_the_longest_difference_first() -> None:
    before = [span("compile", key(name), seconds=took) for name, took in (("a", 1.0), ("b", 1.0), ("c", 3.0))]
    after = [span("compile", key(name), seconds=took) for name, took in (("a", 1.5), ("b", 4.0), ("c", 2.0))]
    assert slower(before, after) == [("b", 1.0, 4.0), ("a", 1.0, 1.5)]


@pytest.mark.parametrize(("was", "now"), [(1.0, 1.09), (0.01, 0.05), (2.0, 2.0), (2.0, 1.0)])
def test_a_small_difference_is_noise(was: float, now: float) -> None:
    assert not slower([span("compile", key(), seconds=was)], [span("compile", key(), seconds=now)])


def test_a_new_key_is_slower_than_its_nearest_relative_of_the_earlier_run() -> None:
    old, new = key(stages=2), key(stages=4)
    before, after = [span("compile", old, seconds=1.0)], [span("compile", new, seconds=3.0)]
    assert slower(before, after, [old, new]) == [("matmul", 1.0, 3.0)]
    assert slower(before, after, [new]) == [], "which one is the nearest is not known"
    found = compared(timeline("a", *before), timeline("b", *after), manifests([old, new]))
    assert "  +2.00 s: matmul " in "\n".join(comparison_lines(found))
    assert ": 1.00 s → 3.00 s (stages: 2 → 4)" in "\n".join(comparison_lines(found))


def test_a_kernel_that_the_earlier_run_only_loaded_is_compared_with_the_compile_that_made_it() -> None:
    loads = [span("load", key(), begin, 0.01, saved=1.0) for begin in (0, 1)]
    assert slower(loads, [span("compile", key(), seconds=3.0)]) == [("matmul", 1.0, 3.0)]


def test_a_kernel_whose_earlier_compile_is_unknown_is_not_slower() -> None:
    for unknown in (span("wait", key()), span("load", key())):
        assert not slower([unknown], [span("compile", key(), seconds=3.0)])


def test_a_kernel_that_was_compiled_twice_is_not_slower_by_that() -> None:
    once, again = span("compile", key()), span("compile", key(), 1.0)
    assert not slower([once], [once, again])


def test_the_sums_of_both_runs_are_those_of_their_reports() -> None:
    before = timeline(
        "a", span("compile", key("a"), 0, 2.0), span("wait", key("b"), 2.0, 1.0), span("load", key("b"), 3.0)
    )
    after = timeline("b", span("load", key("a"), 0, 1.0, saved=2.0), span("load", key("b"), 1000, 1.0, saved=2.0))
    changes = {c.name: (c.earlier, c.later) for c in compared(before, after, None).changes}
    assert changes == {
        "ranks": (1, 1), "kernels": (2, 2), "compiled": (1, 0), "compile_seconds": (2.0, 0), "loads": (1, 2),
        "waits": (1, 0), "wait_seconds": (1.0, 0), "first_steps_seconds": (4.0, 1.0),
    }  # fmt: skip
    lines = list(comparison_lines(compared(before, after, None)))
    assert "  spent compiling: 2.00 s → 0 ms (−2.00 s)" in lines
    assert "  loads: 1 → 2 (+1)" in lines
    assert "  ranks: 1 → 1" in lines


# On the terminal and on the page


def test_a_terminal_gets_the_first_of_many_and_their_number() -> None:
    old = [key(f"k{n}", n=n) for n in range(50)]
    new = [key(f"k{n}", n=n + 100) for n in range(50)]
    before = timeline("a", *(span("compile", k, seconds=1.0) for k in old))
    after = timeline("b", *(span("compile", k, seconds=9.0 - n / 10) for n, k in enumerate(new)))
    found = compared(before, after, manifests(old + new))
    lines = list(comparison_lines(found))
    assert lines.count("  and 40 more: the page has them") == 2
    assert "new in this run: 50 keys" in lines
    assert len(lines) < 40
    html = page(after, findings_of(after), [], [], found)
    assert all(f"k{n}" in html for n in range(50))


def test_names_and_values_of_a_comparison_are_text() -> None:
    old = [key(name, flag=HOSTILE[0]) for name in HOSTILE]
    new = [key(name, flag=HOSTILE[1]) for name in HOSTILE]
    before = timeline(HOSTILE[0], *(span("compile", k) for k in (*old, key(HOSTILE[1] + "gone"))))
    after = timeline("b", *(span("compile", k, seconds=2.0) for k in new))
    found = compared(before, after, manifests(old + new))
    assert (len(found.slower), len(found.gone)) == (len(HOSTILE), len(HOSTILE) + 1)
    seen = Text(page(after, findings_of(after), [], [], found))
    assert seen.tags.count("script") == 2
    assert "img" not in seen.tags
    assert "\u2028" not in "".join(comparison_lines(found))


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

    eventually(lambda: facts()["changes"]["kernels"] == {"earlier": 2, "later": 2})
    found = facts()
    assert found["job"] == "first"
    assert {r["kernels"][0]["name"]: r["differences"] for r in found["new"]} == {
        "scale": [["options warps", "4", "8"]],
        "fresh": [],
    }
    assert sorted(k["name"] for k in found["gone"]) == ["gone", "scale"]
    told = run(sandbox, "report", "first", "second").stdout
    assert told.startswith("kcoord-second.html: job second, 2 compiles")
    assert "compared with job first:" in told
    assert "  1 key: options warps: 4 → 8: scale " in told
    assert "  1 key: the earlier run asked for no kernel of this name: fresh " in told
    seen = Text((sandbox.root / "kcoord-second.html").read_text()).text
    assert "Compared with job first" in seen
    assert "options warps 4 8" in seen
    assert "Compared with" not in run(sandbox, "report", "second", "-o", "-").stdout
    assert "comparison" not in json.loads(run(sandbox, "report", "second", "--json").stdout)
    quick = json.loads(run(sandbox, "report", "first", "second", "--json", "--no-misses").stdout)["comparison"]
    assert sum(len(r["kernels"]) for r in quick["new"]) == 2


def test_a_comparison_that_cannot_be_made_is_one_line_with_the_remedy(sandbox: Sandbox) -> None:
    save(sandbox.local, "a", "n", {0: [span("compile", key())]})
    save(sandbox.local, "b", "n", {0: [span("compile", key(), 100)]})
    for jobs in (("a", "nothing"), ("nothing", "a")):
        told = run(sandbox, "report", *jobs, code=1).stderr
        assert told == "kcoord: there is no time line of job 'nothing'; these jobs have one: b, a\n"
    assert "JOB and OTHER are one job" in run(sandbox, "report", "a", "a", code=2).stderr
    assert run(sandbox, "report", "a", "b").stderr == ""
    assert "job b began after job a: name the earlier run first" in run(sandbox, "report", "b", "a").stderr
    torn = save(sandbox.local, "torn", "n", {})
    torn.write_bytes(b"no time line")
    told = run(sandbox, "report", "torn", "b", code=1).stderr
    assert told.startswith("kcoord: nothing of job 'torn' could be read")
    assert "no time line" in told


def test_hours_are_about_the_later_run_alone(sandbox: Sandbox) -> None:
    save(sandbox.local, "a", "n", {0: [span("compile", key())]})
    make(sandbox, "b")
    assert "compared with job a" in run(sandbox, "report", "a", "b", "--hours", "1").stdout


def test_problems_of_the_earlier_run_are_told_with_its_name(sandbox: Sandbox) -> None:
    save(sandbox.local, "a", "n", {0: [span("compile", key())]})
    save(sandbox.local, "a", "m", {}).write_bytes(b"no time line")
    save(sandbox.local, "b", "n", {0: [span("compile", key(), 100)]})
    assert "kcoord: not read: job a: " in run(sandbox, "report", "a", "b").stderr
