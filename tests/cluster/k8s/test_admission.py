"""The admission policy makes of a labelled pod what the components make of it. Not tested: an API server."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.k8s.admission import applied, as_pod, inject, params, policy
from tests.cluster.k8s.manifests import ROOT, Object, checkout, environment, is_sidecar, kustomized, objects, pods
from tests.cluster.k8s.promises import check, quality

validation = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
IMAGE = "registry.example.com/kcoord-agent:0.1.0"
LABELS = {
    "pytorchjob": {"training.kubeflow.org/job-name": "train"},
    "mpijob": {"training.kubeflow.org/job-name": "train", "batch.kubernetes.io/job-name": "train-launcher"},
    "leaderworkerset": {"leaderworkerset.sigs.k8s.io/name": "train"},
    "volcano": {"volcano.sh/job-name": "train"},
    "rayjob": {"ray.io/cluster": "train"},
}
"""For each recipe the labels that its controller adds to pods; an MPIJob's launcher is a Job's pod as well."""


def validate(each: Object) -> None:
    validation.validate(each, validation.latest_version(), strict=True)


# --- the policy ---


@pytest.mark.parametrize(("version", "api"), [("1.34", "v1beta1"), ("1.36", "v1"), (validation.latest_version(), "v1")])
def test_the_policy_is_valid_ignores_its_own_faults_and_is_switched_by_each_namespace(version: str, api: str) -> None:
    for each in applied():
        each["apiVersion"] = f"admissionregistration.k8s.io/{api}"
        validation.validate(each, version, strict=True)
    validation.validate(params(), version, strict=True)
    (binding,) = (each for each in applied() if each["kind"] == "MutatingAdmissionPolicyBinding")
    assert binding["spec"]["policyName"] == policy()["metadata"]["name"]
    assert binding["spec"]["paramRef"] == {"name": params()["metadata"]["name"], "parameterNotFoundAction": "Allow"}
    assert policy()["spec"]["failurePolicy"] == "Ignore"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("overlay", "label"),
    [("indexed-job", "batch.kubernetes.io/job-name"), ("jobset", "jobset.sigs.k8s.io/jobset-name")],
)
@pytest.mark.parametrize(
    ("components", "switches"),
    [([], {}), (["metrics", "local-disk"], {"metrics": "true", "localClaim": "kcoord-local"})],
)
def test_a_pod_is_what_the_components_make_of_it(
    tmp_path: Path, overlay: str, label: str, components: list[str], switches: dict[str, str]
) -> None:
    with_agent = next(pods(kustomized(tmp_path, [checkout() / "overlays" / overlay], *components)))
    without = copy.deepcopy(with_agent)
    _take_out(without.spec)
    labels = {"kcoord/agent": "sidecar", label: "train"}
    made = inject(policy(), as_pod(without, **labels), params(**switches))
    wanted = as_pod(with_agent, **labels)
    _resolve_labels(wanted)
    assert _sorted(made) == _sorted(wanted)


def _take_out(spec: Object) -> None:
    spec["initContainers"] = [c for c in spec["initContainers"] if not c["name"].startswith("kcoord-")]
    spec["volumes"] = [v for v in spec["volumes"] if not v["name"].startswith("kcoord")]
    for container in spec["containers"]:
        container["env"] = [e for e in container["env"] if not e["name"].startswith("KCOORD_")]
        container["volumeMounts"] = [m for m in container["volumeMounts"] if not m["name"].startswith("kcoord")]


def _resolve_labels(pod: Object) -> None:
    for container in [*pod["spec"]["initContainers"], *pod["spec"]["containers"]]:
        for entry in container["env"]:
            path = entry.pop("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
            if path:
                entry["value"] = pod["metadata"]["labels"].get(path.removeprefix("metadata.labels['")[:-2], "")


def _sorted(value: Any) -> Any:
    """Without the order of what has names, and without what is empty."""
    if isinstance(value, dict):
        return {name: _sorted(inner) for name, inner in value.items() if inner != []}
    if isinstance(value, list) and all(isinstance(each, dict) for each in value):
        return sorted(map(_sorted, value), key=lambda each: str(each.get("mountPath", each.get("name"))))
    return value


@pytest.mark.parametrize(
    ("labels", "given"),
    [
        ({}, params()),
        ({"kcoord/agent": "other"}, params()),
        ({"kcoord/agent": "sidecar"}, None),
        ({"kcoord/agent": "sidecar"}, {"data": {"metrics": "true"}}),
        ({"kcoord/agent": "sidecar"}, {"metadata": {"name": "kcoord-inject"}}),
    ],
    ids=["no label", "another label", "no ConfigMap", "no image", "no data"],
)
def test_other_pods_start_as_they_are(labels: dict[str, str], given: Object | None) -> None:
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "a", "image": "a:1"}]}}
    assert inject(policy(), pod, given) == pod


def test_a_namespace_chooses_its_agents_cpu_and_memory() -> None:
    pod = as_pod(next(pods(objects("indexed-job"))))
    _take_out(pod["spec"])
    (agent,) = inject(policy(), pod, params(cpu="500m", memory="1Gi"))["spec"]["initContainers"]
    assert agent["resources"]["limits"] == {"cpu": "500m", "memory": "1Gi"}
    assert agent["resources"]["requests"].items() >= agent["resources"]["limits"].items()


def test_a_pod_that_has_an_agent_gets_no_second_one() -> None:
    pod = as_pod(next(pods(objects("indexed-job"))))
    assert pod["metadata"]["labels"]["kcoord/agent"] == "sidecar"
    assert inject(policy(), pod, params()) == pod


@pytest.mark.parametrize("switches", [{}, {"metrics": "true", "localClaim": "mine"}])
@pytest.mark.parametrize("before", [[{"name": "data", "image": "a:1"}], None], ids=["", "no init containers"])
def test_a_pod_that_says_little_is_valid_with_an_agent(switches: dict[str, str], before: list[Object] | None) -> None:
    spec = {"containers": [{"name": "a", "image": "a:1"}, {"name": "b", "image": "b:1"}]}
    labels = {"kcoord/agent": "sidecar"}
    pod: Object = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "mine", "labels": labels}, "spec": spec}
    if before is not None:
        pod["spec"]["initContainers"] = before
    made = inject(policy(), pod, params(**switches))
    validate(made)
    *others, agent = made["spec"]["initContainers"]
    assert (agent["name"], others) == ("kcoord-agent", before or [])
    assert is_sidecar(agent)
    assert agent["image"] == IMAGE
    assert bool(agent.get("ports")) == bool(switches)


@pytest.mark.parametrize("kept", [0, 1])
def test_where_one_mutation_fails_the_other_still_makes_a_pod_that_starts(kept: int) -> None:
    """A failure of either is ignored, and the API server goes on with the next."""
    pod = as_pod(next(pods(objects("indexed-job"))))
    _take_out(pod["spec"])
    damaged = policy()
    damaged["spec"]["mutations"] = [damaged["spec"]["mutations"][kept]]
    made = inject(damaged, pod, params(localClaim="mine"))
    validate(made)
    volumes = {volume["name"] for volume in made["spec"]["volumes"]}
    containers = [*made["spec"].get("initContainers", []), *made["spec"]["containers"]]
    assert {m["name"] for c in containers for m in c.get("volumeMounts", [])} <= volumes


# --- the recipes, whose pods it completes ---


def recipe(name: str) -> list[Object]:
    import yaml

    return list(yaml.safe_load_all((ROOT / "k8s" / "recipes" / f"{name}.yaml").read_text()))


def test_there_is_a_test_of_each_recipe() -> None:
    assert {path.stem for path in (ROOT / "k8s" / "recipes").iterdir()} == {*LABELS, "kueue"}
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert [name for name in (*LABELS, "kueue") if f"k8s/recipes/{name}" not in page] == []


@pytest.mark.parametrize("name", LABELS)
def test_a_recipes_pods_get_an_agent_and_its_socket_and_no_privilege(name: str) -> None:
    check(recipe(name))
    labelled = [pod for pod in pods(recipe(name)) if "kcoord/agent" in pod.metadata.get("labels", {})]
    assert labelled
    for template in labelled:
        made = inject(policy(), as_pod(template, **LABELS[name]), params())
        validate(made)
        check([made])
        (pod,) = pods([made])
        assert quality(pod) == "Guaranteed"
        agent = pod.container("kcoord-agent")
        assert is_sidecar(agent)
        socket = environment(agent)["KCOORD_SOCKET"]["value"]
        wanted = {"KCOORD_SOCKET": socket, "KCOORD_SPAWN": "0", "KCOORD_JOB": "train"}
        wanted["KCOORD_PROFILE"] = template.metadata["labels"]["kcoord/profile"]
        for container in pod.spec["containers"]:
            settings = {name: entry.get("value") for name, entry in environment(container).items()}
            assert wanted.items() <= settings.items()
            (mount,) = (m for m in container["volumeMounts"] if m["name"] == "kcoord")
            assert Path(socket).is_relative_to(mount["mountPath"])


def test_ranks_that_ssh_starts_are_told_of_the_agent() -> None:
    """Their sessions have none of the container's variables."""
    (launcher, _) = pods(recipe("mpijob"))
    command = launcher.spec["containers"][0]["command"]
    passed = {value for option, value in pairwise(command) if option == "-x"}
    assert {"PATH", "KCOORD_SOCKET", "KCOORD_LOCAL_DIR", "KCOORD_SPAWN", "KCOORD_PROFILE", "KCOORD_JOB"} == passed
    assert command[command.index("kcoord") :][:3] == ["kcoord", "exec", "--"]


def test_a_job_in_a_queue_has_its_agent_and_waits() -> None:
    found = objects(checkout() / "recipes" / "kueue")
    check(found)
    (job,) = (each for each in found if each["kind"] == "Job")
    assert job["metadata"]["labels"] == {"kcoord/agent": "sidecar", "kueue.x-k8s.io/queue-name": "training"}
    assert job["spec"]["suspend"] is True
    assert is_sidecar(next(pods([job])).container("kcoord-agent"))
