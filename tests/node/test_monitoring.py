"""The Grafana dashboard and the Kubernetes components for metrics, against what a real agent exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kcoord.agent.metrics import HISTOGRAMS, METRICS
from kcoord.retention.local_collector import keeps_access_times
from kcoord.settings import Settings
from tests.support.agents import ROOT
from tests.support.scrape import Job, run_job


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return run_job(str(tmp_path_factory.mktemp("dashboard") / "store"))


_PROMQL_WORDS = {"by", "on", "or", "and", "sum", "count"}


def names_in(expression: str) -> set[str]:
    """The metrics of a PromQL expression."""
    plain = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\b(?:by|on) *\([^)]*\)", "", expression)
    return set(re.findall(r"\b[a-z_]\w*\b(?! *\()", plain)) - _PROMQL_WORDS


def dashboard() -> Any:
    return json.loads((ROOT / "k8s" / "monitoring" / "dashboard.json").read_text())


def test_promql_is_taken_apart_as_the_test_below_needs() -> None:
    ratio = 'sum by (le) (rate(a_bucket{b="c", d=~"$e"}[$__rate_interval])) / count(f == 0) or vector(0)'
    assert names_in(ratio) == {"a_bucket", "f"}
    assert names_in('topk(10, time() - g{h=~".*"} and on (instance) i)') == {"g", "i"}


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
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells


def test_the_dashboards_labels_are_those_that_metrics_have() -> None:
    known = {label for labels, _ in METRICS.values() for label in labels} | {"le", "instance", "namespace"}
    text = json.dumps(dashboard())
    for labels in re.findall(r"\bby \(([^)]*)\)", text):
        assert set(labels.split(", ")) <= known, labels
    assert set(re.findall(r"\{\{(\w+)\}\}", text)) <= known


# --- Kubernetes ---


def built(tmp_path: Path, overlay: str) -> list[Any]:
    """What ``kubectl kustomize`` makes of an overlay with the two components."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("there is no kubectl: apt-get install kubernetes-client")
    yaml = pytest.importorskip("yaml")
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s")
    mine = tmp_path / "k8s" / "mine"
    mine.mkdir()
    parts = ["../components/monitoring", "../components/metrics"]
    text = {"kind": "Kustomization", "resources": [f"../overlays/{overlay}"], "components": parts}
    (mine / "kustomization.yaml").write_text(json.dumps(text))
    done = subprocess.run([kubectl, "kustomize", str(mine)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def pods_of(document: Any) -> Iterator[Any]:
    """The pod templates of whatever makes pods."""
    if isinstance(document, dict):
        if "initContainers" in document.get("spec", {}):
            yield document
        for value in document.values():
            yield from pods_of(value)
    elif isinstance(document, list):
        for value in document:
            yield from pods_of(value)


@pytest.mark.parametrize("overlay", ["indexed-job", "jobset", "trainjob"])
def test_prometheus_finds_the_port_that_the_sidecar_serves(tmp_path: Path, overlay: str) -> None:
    documents = built(tmp_path, overlay)
    (monitor,) = (d for d in documents if d["kind"] == "PodMonitor")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert set(endpoint) == {"port", "path", "interval", "scrapeTimeout"}
    assert set(monitor["spec"]) == {"selector", "podMetricsEndpoints", "podTargetLabels"}
    pods = [pod for document in documents if document["kind"] != "PodTemplate" for pod in pods_of(document)]
    assert pods
    for pod in pods:
        assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        (sidecar,) = (c for c in pod["spec"]["initContainers"] if c["name"] == "kcoord-agent")
        (port,) = (p for p in sidecar["ports"] if p["name"] == endpoint["port"])
        assert len(port["name"]) <= 15
        (metrics,) = (e["value"] for e in sidecar["env"] if e["name"] == "KCOORD_METRICS")
        assert Settings.from_environ({"KCOORD_METRICS": metrics}).metrics == f"0.0.0.0:{port['containerPort']}"
        others = pod["spec"]["containers"] + [c for c in pod["spec"]["initContainers"] if c is not sidecar]
        assert not [c["name"] for c in others if any(e["name"] == "KCOORD_METRICS" for e in c.get("env", ()))]
