"""Whatever says figures of one job says the same: the launchers' last lines, stats, the report and the metrics."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

import pytest

from kcoord.report.timeline import load_timeline
from kcoord.settings import Settings
from kcoord.telemetry.figures import FIGURES, OUTCOMES, figures
from kcoord.telemetry.spans import Process, Span
from tests.support.command import KCOORD, as_json, kcoord
from tests.support.ports import reserve_port
from tests.support.sandbox import PROGRAMS, Sandbox, finish

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
        r"kcoord: (\d+) compiles failed\nkcoord: (\d+) kernels: (\d+) compiled, (\d+) loaded \(([\d.]+) s saved\); "
        r"all ready ([\d.]+) s after launch; kcoord report j\n",
        done.stderr,
    )
    assert line, done.stderr
    names = ("failures", "kernels", "compiles", "loaded", "saved_seconds", "ready_seconds")
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
    began = time.time()
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
        assert 0 < live["ready"] - said["ready_seconds"] - began < 60
        assert said["saved_seconds"] == pytest.approx(live["saved_seconds"], abs=0.06)
    for name in (*OUTCOMES, "requests", "alone", "saved_seconds", "compile_seconds", "wait_seconds"):
        assert stats[name] == pytest.approx(sum(live[name] for _, _, live, _ in nodes), abs=0.005), name
    spans = [span for _, span in load_timeline(Settings.from_environ(here), "j").spans() if span.compiled]
    assert sum(span.seconds for span in spans) - stats["compile_seconds"] > 0.19, "parts of a compile count once"


def test_without_a_store_it_is_said_that_other_nodes_are_missing(sandbox: Sandbox) -> None:
    kcoord(sandbox, "exec", "--job", "j", "--", sys.executable, str(PROGRAMS / "generic_rank.py"), "1")
    assert as_json(sandbox, "stats", "--job", "j")["scope"] == "this node only"
    assert "job j, this node only: " in kcoord(sandbox, "stats").stdout
    assert "job j, this node only: " in kcoord(sandbox, "report", "j").stdout


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
        "saved_seconds": 2.5, "ready": 1e9 + 4, "dropped": 7, "stood_aside": [],
        "unfinished": [{"kernel": "ef", "process": "rank 0", "seconds": 1.0}],
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
    last = "kcoord: 0 kernels: 0 compiled, 0 loaded (0.0 s saved)\n"
    assert f"kcoord: {SAID}: each compiled for itself; kcoord doctor\n{last}" in done.stderr
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


# A job that ends badly.

DIES = """
import os, signal
import kcoord

def compile(staging):
    os.kill(os.getpid(), signal.SIGKILL)

key = kcoord.CacheKey.of("test", "k0")
kcoord.connect().get_or_compile(key, compile, scope=kcoord.Scope.TARGET)
"""


def test_a_compile_that_its_rank_did_not_end_is_named_before_the_last_line(sandbox: Sandbox) -> None:
    program = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', os.environ['RANK_CODE']])"
    command = (*KCOORD, "exec", "--job", "j", "--", sys.executable, "-c", program)
    done = finish(sandbox.start(*command, RANK_CODE=DIES, RANK="3", KCOORD_POOL_WORKERS="0"))
    assert re.search(
        r"kcoord: k0 was being compiled by rank 3 for [\d.]+ s when that process ended\nkcoord: 1 kernel: 0 compiled, ",
        done.stderr,
    ), done.stderr
    assert [each["kernel"] for each in as_json(sandbox, "stats", "--job", "j")["unfinished"]] == ["k0"]


def test_a_compile_that_another_rank_ended_is_not_named() -> None:
    lost, made = span("compile", outcome="lost"), span("compile")
    for order in ((lost, made), (made, lost)):
        assert figures((RANK_0, each) for each in order)["unfinished"] == []


def test_three_troubles_are_said_before_the_last_line_and_the_others_are_counted(sandbox: Sandbox) -> None:
    program = "import subprocess, sys; [subprocess.run([sys.executable, '-c', each]) for each in sys.argv[1:]]"
    kernels = [DIES.replace("k0", f"k{number}") for number in range(5)]
    command = (*KCOORD, "exec", "--job", "j", "--", sys.executable, "-c", program, *kernels)
    done = finish(sandbox.start(*command, RANK="3", KCOORD_POOL_WORKERS="0"))
    said = [line for line in done.stderr.splitlines() if "Killed" not in line]
    assert [line.split()[1] for line in said] == ["k0", "k1", "k2", "…", "5"], done.stderr
    assert said[3] == "kcoord: … and 2 more: kcoord report j"
