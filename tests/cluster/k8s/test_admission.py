"""The admission policy makes of a labelled pod what the components make of it. Not tested: an API server."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.k8s.admission import applied, as_pod, inject, params, policy
from tests.cluster.k8s.lint import complaints
from tests.cluster.k8s.manifests import Object, checkout, is_sidecar, objects, pods

validation = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
IMAGE = "registry.example.com/kcoord-agent:0.1.0"


@pytest.mark.parametrize(("version", "api"), [("1.34", "v1beta1"), ("1.36", "v1"), (validation.latest_version(), "v1")])
def test_the_policy_is_valid(version: str, api: str) -> None:
    for each in applied():
        each["apiVersion"] = f"admissionregistration.k8s.io/{api}"
        validation.validate(each, version, strict=True)
    validation.validate(params(), version, strict=True)


def test_the_binding_names_the_policy_and_each_namespaces_own_switch() -> None:
    (binding,) = (each for each in applied() if each["kind"] == "MutatingAdmissionPolicyBinding")
    assert binding["spec"]["policyName"] == policy()["metadata"]["name"]
    assert binding["spec"]["paramRef"] == {"name": params()["metadata"]["name"], "parameterNotFoundAction": "Allow"}


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
    with_agent = next(pods(_overlay(tmp_path, overlay, components)))
    without = copy.deepcopy(with_agent)
    _take_out(without.spec)
    labels = {"kcoord/agent": "sidecar", label: "train"}
    made = inject(policy(), as_pod(without, **labels), params(**switches))
    wanted = as_pod(with_agent, **labels)
    _resolve_labels(wanted)
    assert _sorted(made) == _sorted(wanted)


def _overlay(directory: Path, name: str, components: list[str]) -> list[Object]:
    import os

    def path(*parts: str) -> str:
        return os.path.relpath(checkout().joinpath(*parts), directory)

    named = ", ".join(path("components", each) for each in components)
    (directory / "kustomization.yaml").write_text(f"resources: [{path('overlays', name)}]\ncomponents: [{named}]\n")
    return objects(directory)


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


def test_a_pod_that_has_an_agent_gets_no_second_one() -> None:
    pod = as_pod(next(pods(objects("indexed-job"))))
    assert pod["metadata"]["labels"]["kcoord/agent"] == "sidecar"
    assert inject(policy(), pod, params()) == pod


@pytest.mark.parametrize("switches", [{}, {"metrics": "true", "localClaim": "mine"}])
def test_a_pod_that_says_little_is_valid_with_an_agent(switches: dict[str, str]) -> None:
    pod: Object = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "mine", "labels": {"kcoord/agent": "sidecar"}},
        "spec": {
            "initContainers": [{"name": "data", "image": "a:1"}],
            "containers": [{"name": "a", "image": "a:1"}, {"name": "b", "image": "b:1"}],
        },
    }
    for kept in (True, False):
        if not kept:
            del pod["spec"]["initContainers"]
        made = inject(policy(), pod, params(**switches))
        validation.validate(made, validation.latest_version(), strict=True)
        agent, prefetch = made["spec"]["initContainers"][-2:]
        assert (agent["name"], prefetch["name"]) == ("kcoord-agent", "kcoord-prefetch")
        assert len(made["spec"]["initContainers"]) == 2 + kept
        assert is_sidecar(agent)
        assert {c["image"] for c in (agent, prefetch)} == {IMAGE}
        assert ("ports" in agent and agent["ports"] != []) == bool(switches)
        said = [line for line in complaints([made]) if "kcoord-agent" in line or "kcoord-prefetch" in line]
        assert said == [], "what the pod itself lacks, others complain about"


def test_where_one_mutation_fails_the_other_still_makes_a_pod_that_starts() -> None:
    """A failure of either is ignored, and the API server goes on with the next."""
    pod = as_pod(next(pods(objects("indexed-job"))))
    _take_out(pod["spec"])
    for kept in (0, 1):
        damaged = policy()
        damaged["spec"]["mutations"] = [damaged["spec"]["mutations"][kept]]
        made = inject(damaged, pod, params(localClaim="mine"))
        validation.validate(made, validation.latest_version(), strict=True)
        volumes = {volume["name"] for volume in made["spec"]["volumes"]}
        containers = [*made["spec"].get("initContainers", []), *made["spec"]["containers"]]
        assert {m["name"] for c in containers for m in c.get("volumeMounts", [])} <= volumes


def test_a_fault_of_the_policy_keeps_no_pod_from_starting() -> None:
    assert policy()["spec"]["failurePolicy"] == "Ignore"
