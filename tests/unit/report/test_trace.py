"""``kcoord trace``: a job's time line in Chrome's format."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from kcoord.report.timeline import jobs, load_timeline
from kcoord.report.trace import lanes
from kcoord.settings import Settings
from kcoord.telemetry import span_files
from kcoord.telemetry.spans import Process, Span, directory_name, job_of
from tests.support.command import KCOORD
from tests.support.command import kcoord as run
from tests.support.pages import save
from tests.support.sandbox import PROGRAMS, Sandbox

RANK = PROGRAMS / "generic_rank.py"


def span(name: str, begin: float, seconds: float, kind: str = "compile", outcome: str = "ok", key: str = "ab") -> Span:
    return Span(kind, outcome, "test", name, key, 1e9 + begin, seconds)


def check(trace: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """The spans by row, after every event was held against the Trace Event Format."""
    rows: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    named: dict[str, set[Any]] = defaultdict(set)
    assert trace["displayTimeUnit"] == "ms"
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["ph"] in ("X", "M", "i")
        assert type(event["pid"]) is type(event["tid"]) is type(event["ts"]) is int
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
            row = event["pid"] if event["name"].startswith("process") else (event["pid"], event["tid"])
            assert row not in named[event["name"]], "named once"
            named[event["name"]].add(row)
            continue
        assert event["ts"] >= 0
        if event["ph"] == "i":
            assert (event["cat"], event["s"], event["tid"]) == ("agent", "p", 0), "of the whole node"
            continue
        assert type(event["dur"]) is int
        assert event["dur"] >= 0
        assert event["cat"] in ("compile", "wait", "load", "fetch")
        assert {"key", "backend", "outcome"} <= event["args"].keys()
        rows[event["pid"], event["tid"]].append(event)
    assert set(rows) <= named["thread_name"]
    assert {pid for pid, _ in rows} <= named["process_name"]
    assert len({tid for _, tid in rows}) == len(rows), "viewers tell rows apart by tid"
    for spans in rows.values():
        ends: list[int] = []
        for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
            assert not ends or event["ts"] >= ends[-1], "spans of a row are apart"
            ends.append(event["ts"] + event["dur"])
    return rows


def test_a_jobs_trace_holds_what_its_ranks_did_in_chromes_format(sandbox: Sandbox) -> None:
    ranks = "for r in 0 1 2; do RANK=$r %s %s 4 0.2 & done; wait" % (sys.executable, RANK)  # noqa: UP031
    closing = sandbox.run_kcoord(*KCOORD, "exec", "--job", "my job", "--", "bash", "-c", ranks).stderr
    assert "4 compiled" in closing
    assert "kcoord report 'my job'" in closing
    done = run(sandbox, "trace", "my job")
    path = sandbox.root / "kcoord-my_job.trace.json"
    assert str(path.name) in done.stdout
    trace = json.loads(path.read_text())
    rows = check(trace)
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] in ("thread_name", "process_name")}
    assert names == {os.uname().nodename, "rank 0", "rank 1", "rank 2"}
    events = [e for row in rows.values() for e in row]
    assert sum(e["cat"] == "compile" for e in events) == 4
    assert sum(e["cat"] == "load" for e in events) == 8
    assert {e["name"] for e in events} == {"k0", "k1", "k2", "k3"}
    assert min(e["ts"] for e in events) == 0
    assert all(2e5 <= e["dur"] < 1e7 for e in events if e["cat"] == "compile"), "microseconds"
    assert trace["otherData"]["job"] == "my job"


def test_the_trace_goes_to_stdout_or_a_file_and_facts_are_json(sandbox: Sandbox) -> None:
    save(sandbox.local, "j", "n", {0: [span("a", 0, 1)]})
    assert len(check(json.loads(run(sandbox, "trace", "j", "-o", "-").stdout))) == 1
    facts = json.loads(run(sandbox, "trace", "j", "-o", "t.json", "--json").stdout)
    assert (facts["spans"], facts["ranks"], facts["nodes"], facts["file"]) == (1, 1, 1, "t.json")
    assert "give -o a file" in run(sandbox, "trace", "j", "-o", "-", "--json", code=2).stderr
    failed = run(sandbox, "trace", "j", "-o", "/nowhere/t.json", code=1).stderr
    assert "/nowhere/t.json: it cannot be written" in failed
    assert len(failed.splitlines()) == 1


def test_the_jobs_are_listed_newest_first_and_an_unknown_one_names_them(sandbox: Sandbox) -> None:
    assert "no job" in run(sandbox, "trace").stdout
    assert "no job has left one" in run(sandbox, "report", "x", code=1).stderr
    for n, job in enumerate(("old", "new [red]", "a/b")):
        os.utime(save(sandbox.local, job, "n", {0: [span("a", 0, 1)]}), (1e9 + n,) * 2)
    store = {"KCOORD_STORE": str(sandbox.root / "store")}
    os.utime(save(sandbox.root / "store" / "v2", "elsewhere", "m", {1: [span("a", 0, 1)]}), (1e9 + 9,) * 2)
    listed = json.loads(run(sandbox, "trace", "--json", **store).stdout)
    assert [j["job"] for j in listed] == ["elsewhere", "a/b", "new [red]", "old"]
    assert "new [red]" in run(sandbox, "report").stdout
    error = run(sandbox, "trace", "other", code=1).stderr
    assert "no time line of job 'other'; these jobs have one: a/b, new [red], old" in error
    assert len(error.splitlines()) == 1
    assert "1 span of 1 rank" in run(sandbox, "trace", "a/b").stdout


def test_rows_are_in_the_order_of_nodes_and_ranks_and_a_restarted_rank_has_two(tmp_path: Path) -> None:
    settings = Settings.from_environ({"KCOORD_LOCAL_DIR": str(tmp_path)})
    save(tmp_path, "j", "a", {10: [span("x", 0, 1)], 9: [span("x", 0, 1)]})
    save(tmp_path, "j", "b", {2: [span("x", 0, 1)], 1: [span("x", 5, 1)]})
    again = span_files.delivery(Process("b", 7, 1), [span("x", 8, 1)]) + span_files.delivery(
        Process("b", 8, None), [span("x", 9, 1)]
    )
    (tmp_path / "traces/j/b-again.spans").write_bytes(span_files.header("b") + again)
    found = load_timeline(settings, "j")
    assert found.nodes == ["b", "a"]
    titles = [found.title(row.process) for row in found.rows]
    assert titles == ["rank 1 (pid 101)", "rank 1 (pid 7)", "rank 2", "pid 8", "rank 9", "rank 10"]
    assert found.ranks == 5


def test_of_two_copies_this_nodes_is_read_and_a_broken_file_hides_no_other(tmp_path: Path) -> None:
    environ = {"KCOORD_LOCAL_DIR": str(tmp_path / "l"), "KCOORD_STORE": str(tmp_path / "s")}
    settings = Settings.from_environ(environ)
    save(tmp_path / "l", "j", "a", {0: [span("x", 0, 1), span("y", 1, 1)]})
    save(tmp_path / "s" / "v2", "j", "a", {0: [span("x", 0, 1)]})
    broken = save(tmp_path / "s" / "v2", "j", "b", {1: [span("x", 0, 1)]})
    broken.write_bytes(b"garbage")
    os.mkfifo(broken.with_name("c.spans"))
    broken.with_name("d.spans").mkdir()
    found = load_timeline(settings, "j")
    assert [s.name for _, s in found.spans()] == ["x", "y"]
    assert [p for p in found.problems if "b-agent.spans" in p]
    assert [j.job for j in jobs(settings)] == ["j"]


def test_of_a_store_that_cannot_be_read_no_empty_page_is_written(sandbox: Sandbox) -> None:
    (sandbox.root / "file").touch()
    for command in ("trace", "report"):
        told = run(sandbox, command, "j", "-o", "out", code=1, KCOORD_STORE=str(sandbox.root / "file" / "x")).stderr
        assert told.startswith("kcoord: nothing of job 'j' could be read: ")
        assert "Not a directory" in told
        assert not (sandbox.root / "out").exists()


STRANGE = ("..", "", "x" * 300, "é" * 300, "\udcff", "a\x1b[31m\nb", "%2E", "[/red]")


def test_every_job_that_is_listed_can_be_named_and_no_name_writes_to_the_terminal(sandbox: Sandbox) -> None:
    for job in STRANGE:
        save(sandbox.local, job, "n", {0: [span("a", 0, 1)]})
        assert directory_name(job_of(sandbox.local / directory_name(job))) == directory_name(job)
    settings = Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local)})
    listed = jobs(settings)
    assert len(listed) == len(STRANGE)
    for job in listed:
        assert len(list(load_timeline(settings, job.job).spans())) == 1
    table = run(sandbox, "trace").stdout
    assert "\x1b" not in table
    assert "[/red]" in table
    error = run(sandbox, "trace", "other", code=1).stderr
    assert len(error.splitlines()) == 1
    assert "1 compile" in run(sandbox, "report", os.fsdecode(b"\xff"), "-o", "r.html").stdout


def test_what_others_left_in_the_store_hides_no_job(sandbox: Sandbox) -> None:
    root = sandbox.root / "store" / "v2"
    save(root, "mine", "n", {0: [span("a", 0, 1)]})
    broken = save(root, "theirs", "n", {0: [span("a", 0, 1)]})
    broken.with_name("gone.spans").symlink_to("/nowhere")
    broken.with_name("round.spans").symlink_to("round.spans")
    (root / "traces/file").write_text("")
    (root / "traces/loop").symlink_to("loop")
    settings = Settings.from_environ(
        {"KCOORD_LOCAL_DIR": str(sandbox.local), "KCOORD_STORE": str(sandbox.root / "store")}
    )
    assert {j.job for j in jobs(settings)} == {"mine", "theirs"}
    assert len(list(load_timeline(settings, "theirs").spans())) == 1
    save(sandbox.local, "file", "n", {0: [span("a", 0, 1)]})
    found = load_timeline(settings, "file")
    assert len(list(found.spans())) == 1, "what this node has is shown all the same"
    assert "Not a directory" in found.problems[0]


def test_a_job_that_has_just_begun_is_not_called_unknown(sandbox: Sandbox) -> None:
    save(sandbox.local, "j", "n", {})
    assert "nothing in it yet" in run(sandbox, "trace", "j", code=1).stderr


def test_hours_leave_out_the_earlier_runs_of_a_job(sandbox: Sandbox) -> None:
    now = time.time() - 1e9
    save(sandbox.local, "j", "n", {0: [span("old", now - 9000, 1), span("new", now - 60, 1)]})
    os.utime(save(sandbox.local, "j", "m", {1: [span("older", now - 9000, 1)]}), (1e9,) * 2)
    assert "3 spans of 2 ranks" in run(sandbox, "trace", "j").stdout
    assert "1 span of 1 rank;" in run(sandbox, "trace", "j", "--hours", "1").stdout
    assert json.loads(run(sandbox, "report", "j", "--hours", "1", "--json").stdout)["compiles"] == 1
    assert "ask for more --hours" in run(sandbox, "trace", "j", "--hours", "0.001", code=1).stderr
    assert "--hours" in run(sandbox, "trace", "j", "--hours", "0", code=2).stderr


def test_rows_hold_no_overlap_whatever_overlaps() -> None:
    chance = random.Random(5)
    spans = sorted((span("", chance.randint(0, 99), chance.randint(0, 20)) for _ in range(2000)), key=lambda s: s.begin)
    found = lanes(spans)
    assert sorted(map(id, spans)) == sorted(id(s) for row in found for s in row)
    assert all(before.end <= after.begin for row in found for before, after in pairwise(row))
