"""Whatever says figures of one job says the same: the launchers' last lines, stats, the report and the metrics."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest

from kcoord.report.timeline import load_timeline
from kcoord.settings import Settings
from kcoord.telemetry.figures import FIGURES, OUTCOMES, figures
from kcoord.telemetry.spans import Process, Span
from tests.support.command import KCOORD, as_json, kcoord
from tests.support.ports import reserve_port
from tests.support.sandbox import Sandbox, finish

RANK = """
import time
import kcoord

coordinator = kcoord.connect()

def get(name, *parts):
    def compile(staging):
        for part in parts:
            get(part)
        time.sleep(0.1)
        assert name != "broken"
        (staging / "kernel.bin").write_text(name)
    key = kcoord.CacheKey.of("test", name)
    return coordinator.get_or_compile(key, compile, scope=kcoord.Scope.TARGET, load=lambda artifact: artifact.path)

for _ in range(31):
    get("whole", "one part", "another part")
get("single")
try:
    get("broken")
except (AssertionError, kcoord.CompileFailed):
    pass
"""
NODE = """
import os, subprocess, sys, urllib.request
ranks = [subprocess.Popen([sys.executable, "-c", os.environ["RANK_CODE"]], env={**os.environ, "RANK": str(n)}) for n in range(2)]
assert not any([rank.wait() for rank in ranks])
print(urllib.request.urlopen("http://" + os.environ["KCOORD_METRICS"]).read().decode())
print("live:", flush=True)
subprocess.run([sys.executable, *sys.argv[1:], "stats", "--job", "j", "--json"], check=True)
"""


Facts = dict[str, Any]


def job(sandbox: Sandbox, node: int, **settings: str) -> tuple[Facts, Facts, Facts, Facts]:
    """Run two ranks on a node; the last line, the metrics, the stats of the living agent, and the node's settings."""
    local = {"KCOORD_LOCAL_DIR": str(sandbox.root / f"local{node}"), **settings}
    metrics = {"KCOORD_METRICS": f"127.0.0.1:{reserve_port()}", "RANK_CODE": RANK, "KCOORD_POOL_WORKERS": "0"}
    done = finish(
        sandbox.start(*KCOORD, "exec", "--job", "j", "--", sys.executable, "-c", NODE, *KCOORD, **local, **metrics)
    )
    assert done.returncode == 0, done.stderr
    line = re.search(
        r"this node: (\d+) kernels, (\d+) requests: (\d+) compiled in ([\d.]+) s, (\d+) loaded \(([\d.]+) s .*, (\d+) failed",
        done.stderr,
    )
    assert line, done.stderr
    names = ("kernels", "requests", "compiles", "compile_seconds", "loaded", "saved_seconds", "failures")
    said = dict(zip(names, map(float, line.groups()), strict=True))
    page, _, live = done.stdout.partition("live:")
    seen = {name: float(value) for name, value in re.findall(r"^(kcoord_\S+) ([\d.e+-]+)$", page, re.MULTILINE)}
    scraped = {o: seen.get(f'kcoord_requests_total{{backend="test",outcome="{o}"}}', 0.0) for o in OUTCOMES}
    scraped["alone"] = seen["kcoord_uncoordinated_total"]
    scraped["saved_seconds"] = seen["kcoord_saved_seconds_total"]
    scraped["compile_seconds"] = seen.get('kcoord_compile_seconds_sum{backend="test"}', 0.0)
    return said, scraped, json.loads(live), local


def test_the_last_line_stats_report_and_metrics_of_a_job_on_two_nodes_agree(sandbox: Sandbox) -> None:
    store = {"KCOORD_STORE": str(sandbox.root / "store"), "KCOORD_STORE_CREATE": "1"}
    nodes = [job(sandbox, number, **store) for number in (1, 2)]
    _, _, _, here = nodes[0]
    stats = as_json(sandbox, "stats", "--job", "j", **here)
    report = as_json(sandbox, "report", "j", **here)
    assert (stats["scope"], stats["nodes"]) == ("1 node", report["nodes"]), "both have the name of this machine"
    assert {name: stats[name] for name in FIGURES} == {name: report[name] for name in FIGURES}
    assert stats["requests"] == sum(stats[outcome] for outcome in OUTCOMES)
    assert (stats["compiles"], stats["kernels"], stats["memory_hits"], stats["failures"]) == (4, 5, 120, 4)
    assert stats["store_hits"] >= 2
    for said, scraped, live, _ in nodes:
        assert live["scope"] == "this node"
        for name in (*OUTCOMES, "alone"):
            assert live[name] == scraped[name], name
        for name in ("saved_seconds", "compile_seconds"):
            assert live[name] == pytest.approx(scraped[name], abs=0.002), name
        live["loaded"] = sum(live[name] for name in ("memory_hits", "local_hits", "store_hits", "waits"))
        assert {name: value for name, value in said.items() if not name.endswith("_seconds")} == {
            name: live[name] for name in said if not name.endswith("_seconds")
        }
        assert said["compile_seconds"] == pytest.approx(live["compile_seconds"], abs=0.06)
        assert said["saved_seconds"] == pytest.approx(live["saved_seconds"], abs=0.06)
    for name in (*OUTCOMES, "requests", "alone", "saved_seconds", "compile_seconds", "wait_seconds"):
        assert stats[name] == pytest.approx(sum(live[name] for _, _, live, _ in nodes), abs=0.005), name
    spans = [span for _, span in load_timeline(Settings.from_environ(here), "j").spans() if span.compiled]
    assert sum(span.seconds for span in spans) - stats["compile_seconds"] > 0.19, "parts of a compile count once"


def test_without_a_store_it_is_said_that_other_nodes_are_missing(sandbox: Sandbox) -> None:
    *_, here = job(sandbox, 1)
    assert as_json(sandbox, "stats", "--job", "j", **here)["scope"] == "this node only"
    assert "job j, this node only: " in kcoord(sandbox, "stats", **here).stdout
    assert "job j, this node only: " in kcoord(sandbox, "report", "j", **here).stdout


def span(kind: str, key: str = "ab", **more: Any) -> Span:
    return Span(
        kind, **{"outcome": "ok", "backend": "test", "name": key, "key": key * 8, "begin": 1e9, "seconds": 1.0, **more}
    )


RANK_0, POOL = Process("n", 1, 0), Process("n", 2, None, pool=True)


def test_each_figure_comes_from_its_spans() -> None:
    found = figures(
        [
            (RANK_0, span("memory", "", count=5)),
            (RANK_0, span("load", saved=2.0)),
            (RANK_0, span("fetch")),
            (RANK_0, span("load", source="pack", saved=0.5)),
            (RANK_0, span("load", source="store")),
            (RANK_0, span("wait", seconds=3.0)),
            (RANK_0, span("load", source="wait")),
            (RANK_0, span("wait", outcome="lead", seconds=0.5)),
            (RANK_0, span("compile", "cd", seconds=4.0, inside=1.5)),
            (RANK_0, span("compile", "cd", outcome="alone")),
            (RANK_0, span("compile", "ef", outcome="failed")),
            (RANK_0, span("compile", "ef", outcome="lost")),
            (RANK_0, span("compile", "01", aside=True)),
            (POOL, span("compile", "ab")),
            (POOL, span("compile", "23")),
        ],
        dropped=7,
    )
    assert found == {
        "requests": 12, "memory_hits": 5, "local_hits": 1, "store_hits": 2, "waits": 1, "compiles": 4, "failures": 1,
        "kernels": 4, "pack_hits": 1, "alone": 1, "ahead": 2, "ahead_used": 1, "compile_seconds": 5.5, "wait_seconds": 3.5,
        "saved_seconds": 2.5, "dropped": 7, "stood_aside": [],
    }  # fmt: skip
    assert tuple(found) == FIGURES
    assert not any(figures([]).values())


# A compiler that is not hooked.

ASIDE = """
from kcoord.backends.reliances import stand_aside
for _ in range(2):
    stand_aside("toy", "toy 2.0", "kernels", "Toy.compile differs")
"""
SAID = "kcoord stood aside from kernels (toy 2.0: Toy.compile differs) in 2 ranks"


def test_the_last_line_stats_status_report_and_metrics_name_what_kcoord_left_alone_and_why(sandbox: Sandbox) -> None:
    metrics = {"KCOORD_METRICS": f"127.0.0.1:{reserve_port()}", "RANK_CODE": ASIDE, "KCOORD_POOL_WORKERS": "0"}
    node = f"{NODE}subprocess.run([sys.executable, *sys.argv[1:], 'status'], check=True)\n"
    done = finish(
        sandbox.start(
            *KCOORD, "exec", "--job", "j", "--", sys.executable, "-c", node, *KCOORD, **metrics, COLUMNS="200"
        )
    )
    page, _, live = done.stdout.partition("live:")
    assert f"0 loaded (0.0 s of compiling saved); {SAID}, which compiled for themselves: kcoord doctor" in done.stderr
    assert done.stderr.count("kcoord: toy 2.0: Toy.compile differs: kcoord stands aside from kernels") == 2
    assert 'kcoord_stood_aside_total{compiler="toy",part="kernels"} 2.0' in page
    found, end = json.JSONDecoder().raw_decode(live.strip())
    assert found["stood_aside"] == [
        {"compiler": "toy", "part": "kernels", "why": "toy 2.0: Toy.compile differs", "ranks": 2}
    ]
    assert f"! j: {SAID}" in live.strip()[end:]
    assert as_json(sandbox, "stats", "--job", "j")["stood_aside"] == found["stood_aside"]
    assert as_json(sandbox, "report", "j")["stood_aside"] == found["stood_aside"]
    assert f"{SAID}." in (sandbox.root / "kcoord-j.html").read_text()


def test_a_rank_that_was_started_again_stands_aside_once_and_processes_without_a_rank_each() -> None:
    aside = span("unhooked", "", outcome="alone", note="toy 2.0: Toy.compile differs")
    again, other, worker = Process("n", 9, 0), Process("n", 3, 1), Process("n", 4, None)
    (found,) = figures((process, aside) for process in (RANK_0, again, other, worker, worker))["stood_aside"]
    assert found["ranks"] == 3
