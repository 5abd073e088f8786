"""Each recipe's pods, as its controller labels them and the admission policy completes them, are pods with an agent."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from tests.cluster.k8s.lint import complaints
from tests.cluster.k8s.manifests import ROOT, Object, checkout, environment, is_sidecar, objects, pods

validation = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
DIRECTORY = ROOT / "k8s" / "recipes"
LABELS = {
    "pytorchjob": {"training.kubeflow.org/job-name": "train"},
    "mpijob": {"training.kubeflow.org/job-name": "train", "batch.kubernetes.io/job-name": "train-launcher"},
    "leaderworkerset": {"leaderworkerset.sigs.k8s.io/name": "train"},
    "volcano": {"volcano.sh/job-name": "train"},
    "rayjob": {"ray.io/cluster": "train"},
}
"""Labels that the kind's controller adds to pods; an MPIJob's launcher is a Job's pod as well."""


def recipe(name: str) -> list[Object]:
    import yaml

    return list(yaml.safe_load_all((DIRECTORY / f"{name}.yaml").read_text()))


def test_there_is_a_test_of_each_recipe() -> None:
    assert {path.stem for path in DIRECTORY.iterdir()} == {*LABELS, "kueue"}
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert [name for name in (*LABELS, "kueue") if f"k8s/recipes/{name}" not in page] == []


@pytest.mark.parametrize("name", LABELS)
def test_no_rule_of_ours_is_broken(name: str) -> None:
    assert complaints(recipe(name)) == []


@pytest.mark.parametrize("name", LABELS)
def test_unknown_fields_are_refused(name: str) -> None:
    (found,) = recipe(name)
    found["spec"]["replicaz"] = 2
    assert [line for line in complaints([found]) if "spec has no field replicaz" in line]


@pytest.mark.parametrize("name", LABELS)
def test_its_pods_get_an_agent_and_its_socket_and_no_privilege(name: str) -> None:
    from tests.cluster.k8s.admission import as_pod, inject, params, policy

    labelled = [pod for pod in pods(recipe(name)) if "kcoord/agent" in pod.metadata.get("labels", {})]
    assert labelled
    for template in labelled:
        made = inject(policy(), as_pod(template, **LABELS[name]), params())
        validation.validate(made, validation.latest_version(), strict=True)
        assert complaints([made]) == []
        (pod,) = pods([made])
        agent = pod.container("kcoord-agent")
        assert is_sidecar(agent)
        socket = environment(agent)["KCOORD_SOCKET"]["value"]
        for container in pod.spec["containers"]:
            settings = {name: entry.get("value") for name, entry in environment(container).items()}
            assert settings["KCOORD_SOCKET"] == socket
            assert settings["KCOORD_SPAWN"] == "0"
            assert settings["KCOORD_JOB"] == "train"
            assert settings["KCOORD_PROFILE"] == template.metadata["labels"]["kcoord/profile"]
            (mount,) = (m for m in container["volumeMounts"] if m["name"] == "kcoord")
            assert Path(socket).is_relative_to(mount["mountPath"])
        for container in pod.containers:
            assert "privileged" not in container["securityContext"]


def test_ranks_that_ssh_starts_are_told_of_the_agent() -> None:
    """Their sessions have none of the container's variables."""
    (launcher, _) = pods(recipe("mpijob"))
    command = launcher.spec["containers"][0]["command"]
    passed = {value for option, value in pairwise(command) if option == "-x"}
    assert {"PATH", "KCOORD_SOCKET", "KCOORD_LOCAL_DIR", "KCOORD_SPAWN", "KCOORD_PROFILE", "KCOORD_JOB"} == passed
    assert command[command.index("kcoord") :][:3] == ["kcoord", "exec", "--"]


def test_a_job_in_a_queue_has_its_agent_and_waits() -> None:
    found = objects(checkout() / "recipes" / "kueue")
    assert complaints(found) == []
    (job,) = (each for each in found if each["kind"] == "Job")
    assert job["metadata"]["labels"] == {"kcoord/agent": "sidecar", "kueue.x-k8s.io/queue-name": "training"}
    assert job["spec"]["suspend"] is True
    assert is_sidecar(next(pods([job])).container("kcoord-agent"))
