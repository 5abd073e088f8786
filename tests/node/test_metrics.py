"""What an agent tells Prometheus: scraped over HTTP from a real agent that serves real ranks, and read as Prometheus reads it."""

from __future__ import annotations

import errno
import itertools
import json
import re
import shutil
import socket
import socketserver
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from kcoord.agent.http_server import HttpService
from kcoord.agent.metrics import ANSWERS, BUCKETS, HISTOGRAMS, METRICS, OTHER, Metrics
from kcoord.protocol import messages
from kcoord.retention.local_collector import keeps_access_times
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord.telemetry.spans import Span
from tests.support.agents import ROOT, SOON, Node, end_agent, hits, until
from tests.support.ports import reserve_port
from tests.support.scrape import KEYS, RANKS, Job, Scraped, address_of, ask, run_job


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with Node(store=str(tmp_path / "store"), metrics="0") as node:
        node.start()
        yield node


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(str(tmp_path_factory.mktemp("metrics") / "store"))


def test_what_a_job_did_is_what_prometheus_reads(job: Job) -> None:
    seen, counters = job.seen, job.counters
    assert counters["requests"] == RANKS * KEYS
    assert counters["compiles"] == KEYS
    for outcome in ("memory_hits", "local_hits", "store_hits", "waits", "compiles", "failures"):
        assert seen.value("kcoord_requests_total", outcome=outcome, backend="test") == counters[outcome], outcome
    assert seen.value("kcoord_saved_seconds_total") == pytest.approx(counters["saved_seconds"], abs=0.1)
    answers = {a: seen.value("kcoord_claim_wait_seconds_count", backend="test", answer=a) for a in ANSWERS}
    assert answers["lead"] == KEYS
    assert answers["wait"] == counters["waits"]
    assert answers["store"] == counters["store_hits"]
    assert sum(answers.values()) + counters["local_hits"] == RANKS * KEYS
    assert seen.value("kcoord_compile_seconds_count", backend="test") == KEYS
    total = seen.value("kcoord_compile_seconds_sum", backend="test")
    assert total == pytest.approx(counters["compile_seconds"], abs=0.1)
    assert seen.value("kcoord_compile_seconds_bucket", backend="test", le="0.03") == 0
    assert seen.value("kcoord_compile_seconds_bucket", backend="test", le="+Inf") == KEYS
    assert seen.value("kcoord_store_published_bytes_total") == KEYS * len("kernel 0" * 100)
    assert seen.value("kcoord_store_usable") == 1


def test_the_loss_of_redis_is_seen(job: Job) -> None:
    assert job.seen.value("kcoord_coordinated_by", lease_service="redis") == 1
    assert job.seen.value("kcoord_breaker_open", lease_service="redis") == 0
    assert job.without_redis.value("kcoord_coordinated_by", lease_service="redis") == 0
    assert job.without_redis.value("kcoord_breaker_changes_total", lease_service="redis", to="open") == 1
    assert job.without_redis.value("kcoord_notices_total") >= 1


def test_a_claim_that_is_under_way_is_seen_while_it_is(node: Node) -> None:
    address = address_of(node)
    leader, waiter = node.client(), node.client()
    lead = node.lead(leader, "slow")
    waiting = node.claiming(waiter, "slow")
    until(lambda: Scraped(address).value("kcoord_waiting_claims") == 1)
    seen = Scraped(address)
    assert seen.value("kcoord_flights", state="compiling") == 1
    assert seen.value("kcoord_leases_held") == 1
    assert seen.value("kcoord_clients") >= 2
    assert seen.value("kcoord_claim_wait_seconds_count", backend="test", answer="wait") == 0
    assert node.publish(leader, lead, "slow")
    waiting.result(SOON)
    until(lambda: Scraped(address).value("kcoord_claim_wait_seconds_count", backend="test", answer="wait") == 1)
    until(lambda: Scraped(address).value("kcoord_flights", state="compiling") == 0)


def test_an_artifact_of_the_store_that_does_not_verify_is_an_error_of_fetching(node: Node, tmp_path: Path) -> None:
    address, client = address_of(node), node.client()
    lead = node.claim(client, "torn")
    assert node.publish(client, lead, "torn")
    until(lambda: Scraped(address).value("kcoord_store_published_artifacts_total") == 1)
    (payload,) = (tmp_path / "store").glob("v2/objects/*/*")
    payload.write_bytes(b"torn")
    shutil.rmtree(node.home("torn"))  # the node's own copy would answer
    assert node.publish(client, node.claim(client, "torn", "elsewhere"), "torn", "elsewhere")
    until(lambda: Scraped(address).value("kcoord_store_errors_total", operation="fetch", error="invalid") >= 1)


def test_every_metric_has_help_a_type_and_a_base_unit(node: Node) -> None:
    seen = Scraped(address_of(node))
    assert seen.headers["Content-Type"].startswith("text/plain")
    ours = [family for family in seen.families if family.name.startswith("kcoord_")]
    assert {f"{f.name}_total" if f.type == "counter" else f.name for f in ours} == METRICS.keys()
    assert all(f.documentation for f in ours)
    assert all(re.fullmatch(r"kcoord_[a-z_]+", name) for name in METRICS)
    assert {f.name for f in ours if f.type == "histogram"} == set(HISTOGRAMS)
    assert all(name.endswith("_seconds") for name in HISTOGRAMS)
    assert seen.value("process_resident_memory_bytes") > 1e6


@pytest.mark.parametrize(
    ("method", "status"), [("GET", 200), ("HEAD", 405), ("POST", 405), ("DELETE", 405), ("BREW", 405)]
)
def test_metrics_are_only_read(shared_address: str, method: str, status: int) -> None:
    found, headers, text = ask(shared_address, method)
    assert found == status
    assert ("kcoord_clients" in text) == (status == 200)
    assert "Python" not in headers["Server"]


@pytest.fixture(scope="module")
def shared_address() -> Iterator[str]:
    with Node(metrics="0") as node:
        node.start()
        yield address_of(node)


def test_a_scrape_for_which_no_file_can_be_opened_waits_and_keeps_no_core_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent has as many files open as clients, and their end lets the scrape in."""
    looked: list[float] = []
    accept = socketserver.TCPServer.get_request

    def full(server: socketserver.TCPServer) -> tuple[socket.socket, Any]:
        looked.append(time.monotonic())
        if len(looked) < 4:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(server)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", full)
    service = HttpService("metrics", "KCOORD_METRICS", "127.0.0.1:0", Metrics().application(), Notices())
    until(lambda: service.bound)
    Scraped(str(service.bound))
    assert min(later - sooner for sooner, later in itertools.pairwise(looked)) > 0.1


def test_a_port_in_use_is_one_notice_and_the_job_goes_on_and_the_port_is_had_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Node(metrics=str(taken.getsockname()[1])) as node:
        node.start()
        until(lambda: node.status()["notices"])
        (notice,) = node.status()["notices"]
        assert "KCOORD_METRICS" in notice
        assert node.status()["metrics"] is None
        client = node.client()
        lead = node.claim(client, "all the same")
        assert node.publish(client, lead, "all the same")
        taken.close()
        assert Scraped(address_of(node)).value("kcoord_notices_total") >= 1


def test_a_restarted_agent_counts_from_0_at_the_same_address() -> None:
    with Node(metrics=f"127.0.0.1:{reserve_port()}") as node:
        first = node.start()
        address = address_of(node)
        assert node.client().ask(messages.Deliver([hits()]), messages.Done, start=False)
        until(lambda: Scraped(address).sum("kcoord_requests_total") == 1)
        end_agent(first.pid)
        node.start()
        assert address_of(node) == address
        assert Scraped(address).sum("kcoord_requests_total") == 0


def test_without_the_setting_no_port_is_open_and_no_code_of_it_is_loaded() -> None:
    with Node() as node:
        agent = node.start()
        assert node.status()["metrics"] is None
        assert not [c for c in psutil.Process(agent.pid).net_connections() if c.status == psutil.CONN_LISTEN]
    code = "import sys, kcoord.agent.__main__; print([m for m in sys.modules if 'prometheus_client' in m or m == 'http.server'])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("value", ["", "9464", "0.0.0.0:9464", "[::1]:9464", "node-7:0"])
def test_an_address_that_can_be_used_is_a_setting(value: str) -> None:
    found = Settings.from_environ({"KCOORD_METRICS": value}).metrics
    assert found == (None if not value else value if ":" in value else f"127.0.0.1:{value}")
    assert found is None or Settings.from_environ({"KCOORD_METRICS": found}).metrics == found


def compiled(backend: str, seconds: float) -> Span:
    return Span("compile", "ok", backend, "k", "ab" * 8, 1e9, seconds)


def page(metrics: Metrics) -> dict[str, Any]:
    """What Prometheus' own parser makes of it."""
    text = generate_latest(metrics.registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def test_a_strangers_backends_make_few_labels_and_none_that_breaks_a_page() -> None:
    metrics = Metrics()
    for name in ('a"b\\c\nd', "\udcff", "x" * 500, *(f"backend {n}" for n in range(1000))):
        metrics.delivered([compiled(name, 1.0)])
    samples = page(metrics)["kcoord_compile_seconds"].samples
    counts = {s.labels["backend"]: s.value for s in samples if s.name.endswith("count")}
    assert len(counts) == 17
    assert sum(counts.values()) == 1003
    assert counts[OTHER] == 1003 - 16


def test_a_histograms_buckets_hold_what_is_at_most_their_bound() -> None:
    metrics = Metrics()
    metrics.delivered([compiled("test", seconds) for seconds in (0.0, 0.01, 0.011, 600.0, 601.0)])
    family = page(metrics)["kcoord_compile_seconds"]
    found = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("bucket")}
    assert (found["0.01"], found["0.03"], found["600.0"], found["+Inf"]) == (2, 3, 4, 5)
    assert len(found) == len(BUCKETS) + 1
    assert sum(s.value for s in family.samples if s.name.endswith("sum")) == pytest.approx(1201.021)


# --- what there is ---


def held_by(node: Node) -> dict[str, float]:
    """What its page says of what the store and the node hold, once its agent has looked."""
    seen = Scraped(address_of(node))
    return {
        name: seen.value(name) for name in seen.names if re.match("kcoord_(store|local)_(max|counted|artifacts)", name)
    }


def test_nothing_is_said_of_what_there_is_before_it_is_known_but_the_bounds(tmp_path: Path) -> None:
    with Node(store=str(tmp_path / "store"), metrics="0", store_max_files="12") as node:
        node.start()
        assert held_by(node) == {"kcoord_store_max_files": 12}


# --- what is written about them ---


def test_the_documentation_lists_every_metric_with_its_labels_as_the_code_has_it() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert "\n".join(metrics_table()) in text
    histograms = re.findall(r"`(\w+)` and `(\w+)` are\s+histograms", text)
    assert histograms == [HISTOGRAMS]


def metrics_table() -> list[str]:
    """The table of docs/metrics.md."""
    lines = ["| metric | what it is |", "| --- | --- |"]
    for name, (names, doc) in METRICS.items():
        labels = f"{{{', '.join(names)}}}" if names else ""
        lines.append(f"| `{name}{labels}` | {doc} |")
    return lines


# --- the dashboard ---

_PROMQL_WORDS = {"by", "on", "or", "and", "sum", "count"}


def names_in(expression: str) -> set[str]:
    """The metrics of a PromQL expression."""
    plain = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on) *\([^)]*\)", "", expression)
    return set(re.findall(r"\b[a-z_]\w*\b(?! *\()", plain)) - _PROMQL_WORDS


def dashboard() -> Any:
    return json.loads((ROOT / "k8s" / "monitoring" / "dashboard.json").read_text())


def test_the_dashboard_asks_for_what_a_real_agent_exports_and_gives_every_panel_a_unit(job: Job) -> None:
    exported = job.seen.names | job.without_redis.names
    if not keeps_access_times(Path(tempfile.gettempdir())):  # then nothing on a node is looked through
        exported |= {name for name in METRICS if name.startswith("kcoord_local_")}
    board = dashboard()
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    asked = set()
    for panel in panels:
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            assert target["expr"].count("(") == target["expr"].count(")")
            names = names_in(target["expr"])
            assert names <= exported, (panel["title"], names - exported)
            asked |= names
            selected = re.findall(r"\{([^}]*)\}", target["expr"])
            assert all('namespace=~"$namespace", instance=~"$instance"' in each for each in selected), panel["title"]
    series = METRICS.keys() - set(HISTOGRAMS)
    series |= {name + part for name in HISTOGRAMS for part in ("_bucket", "_count")}
    assert series - asked <= {"kcoord_agent_info"}, "it shows all there is"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


def test_the_dashboards_labels_are_those_that_metrics_have() -> None:
    known = {label for labels, _ in METRICS.values() for label in labels} | {"le", "instance", "namespace"}
    text = json.dumps(dashboard())
    for labels in re.findall(r"\bby \(([^)]*)\)", text):
        assert set(labels.split(", ")) <= known, labels
    assert set(re.findall(r"\{\{(\w+)\}\}", text)) <= known
