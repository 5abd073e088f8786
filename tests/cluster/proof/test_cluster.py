"""The manifests' pods on two nodes, whole: a warmed-up job compiles nothing, and a job that suffers every fault ends well."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from kcoord.files.sweep import sweep
from tests.cluster.proof.cluster import LAUNCHER, NODES, RANKS, TRAIN, WORLD, Cluster, cluster, why_not
from tests.cluster.proof.story import JOB, KERNELS, Story, job_with_faults, read_back
from tests.support.sandbox import Sandbox, eventually, finish

_WHY_NOT = why_not()
pytestmark = pytest.mark.skipif(bool(_WHY_NOT), reason=_WHY_NOT)

_TTL = 3.0  # seconds
_FEW = 24  # kernels


@pytest.fixture
def nodes(sandbox: Sandbox) -> Iterator[Cluster]:
    with cluster(sandbox, _TTL) as made:
        yield made


def test_a_job_records_what_it_needs_and_the_next_one_has_it_from_its_pack(nodes: Cluster) -> None:
    """The first job is run by the manifest's own command: torchrun's ranks of both nodes meet at ``train-0.train``."""
    pytest.importorskip("torch")
    ranks = 1  # of a node, which imports torch
    changed = {"--nproc-per-node=8": [f"--nproc-per-node={ranks}"], "train.py": [str(TRAIN), str(_FEW)]}
    for node in nodes.nodes:
        node.new_pod("indexed-job", changed)
        node.start_sidecar()
    first = [node.start("trainer", NOTES=str(nodes.notes), SECONDS_EACH="0.1") for node in nodes.nodes]
    said = [line for trainer in first for line in _reports(finish(trainer))]
    assert sorted(line["rank"] for line in said) == list(range(NODES * ranks))
    assert sum(line["counters"]["compiles"] for line in said) == _FEW
    for node in nodes.nodes:
        node.drain_sidecar()
    nodes.empty_store()

    warms = nodes.nodes[0]
    warms.new_pod("prewarm", {"--target": [], "cuda:90": [], "16": ["2"]})  # these kernels are for no GPU
    warms.start_sidecar()
    warmed = warms.run("trainer")
    assert f"{_FEW} compiled" in warmed.stdout, warmed.stderr
    warms.drain_sidecar()

    for node in nodes.nodes:
        node.new_pod("indexed-job", {})
        node.start_sidecar()
    command = [str(LAUNCHER), str(RANKS), str(WORLD), str(TRAIN), str(_FEW)]
    second = [
        node.start("trainer", ["python", command[0], str(node.number * RANKS), *command[1:]], NOTES=str(nodes.notes))
        for node in nodes.nodes
    ]
    counted = [line["counters"] for trainer in second for line in _reports(finish(trainer))]
    assert [(c["compiles"], c["store_hits"] + c["waits"] + c["local_hits"]) for c in counted] == [(0, _FEW)] * WORLD
    assert sum(c["pack_hits"] for c in counted), "the agents have read it"
    for node in nodes.nodes:
        node.drain_sidecar()
        complaints = [line for log in node.logs for line in log.splitlines()[1:]]
        assert all("they were removed" in line for line in complaints), complaints


def test_a_job_outlives_a_drained_agent_a_dead_node_that_comes_back_and_a_redis_that_is_rolled(nodes: Cluster) -> None:
    story = job_with_faults(nodes)
    print("\n".join(" | ".join(row) for row in story.rows()))
    _every_rank_has_everything(story)
    _nothing_was_compiled_again_without_a_reason(story)
    _nothing_is_left(nodes)
    _each_agent_has_a_log_that_says_what_it_met(nodes)
    read_back(nodes, story)
    assert (story.report["nodes"], story.report["ranks"]) == (["train-0", "train-1"], WORLD)
    assert (story.report["problems"], story.report["dropped"]) == ([], 0)
    assert JOB in story.page


def _reports(done: object) -> list[dict]:  # type: ignore[type-arg]
    assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]  # type: ignore[attr-defined]


def _every_rank_has_everything(story: Story) -> None:
    """A rank that is given wrong bytes ends with an error."""
    assert sorted(line["rank"] for line in story.ranks) == list(range(WORLD))
    assert {line["kernels"] for line in story.ranks} == {KERNELS}
    assert set(story.made) == set(range(KERNELS))


def _nothing_was_compiled_again_without_a_reason(story: Story) -> None:
    """What a dead node had made and not delivered is nowhere: it is made again. Apart from that, each fault costs what was being
    compiled at the time, at most."""
    assert len(story.faults) == 3
    assert max(story.made.values()) <= 2
    assert all(story.fault_of(kernel) for kernel in story.duplicates), story.duplicates
    assert sum(story.made.values()) <= KERNELS + len(story.lost) + WORLD * len(story.faults), story.rows()


def _nothing_is_left(nodes: Cluster) -> None:
    """That no process is, the cluster's end asserts."""
    eventually(lambda: not nodes.leased(), 2 * _TTL, "no lease is left in Redis")
    assert not list(nodes.exported.glob("v2/leases/*/*.lease"))
    staging = nodes.exported / "v2" / "staging"
    assert {path.name.rpartition("-")[0] for path in staging.iterdir()} <= {"train-1-1"}, "but of who was killed"
    sweep(staging, here_after=0, elsewhere_after=0)
    assert not list(staging.iterdir())
    for node in nodes.nodes:
        assert not list(node.pod.path("/kcoord").rglob("staging/*"))


def _each_agent_has_a_log_that_says_what_it_met(nodes: Cluster) -> None:
    assert [len(node.logs) for node in nodes.nodes] == [2] * NODES
    for log in (log for node in nodes.nodes for log in node.logs):
        first, *told = log.splitlines()
        assert re.fullmatch(r"kcoord agent 1 listens at \S+", first)
        assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} kcoord: ", line) for line in told), log
        assert len(told) < 20, log
    for last in (node.logs[-1] for node in nodes.nodes):
        assert "Redis cannot be used" in last
        assert "coordination by Redis is back" in last
