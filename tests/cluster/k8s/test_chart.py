"""The chart, rendered by helm: by default the manifests of k8s/base, and with each value what it says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kcoord
from tests.cluster.k8s.manifests import ROOT, Object, checkout, objects, pods
from tests.cluster.k8s.promises import check

validation = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
CHART = ROOT / "k8s" / "chart"
POLICY = ("MutatingAdmissionPolicy", "MutatingAdmissionPolicyBinding")


def helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    program = shutil.which("helm") or Path(sys.prefix) / "bin" / "helm"
    if not Path(program).exists():
        pytest.skip("no helm: make .venv/bin/helm, or https://helm.sh/docs/intro/install")
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60)


def chart(place: Path = CHART, **values: str) -> dict[tuple[str, str], Object]:
    """The objects of a release in the namespace `team`; ``redis__enabled="false"`` is ``--set redis.enabled=false``."""
    import yaml

    given = [f"--set={name.replace('__', '.')}={value}" for name, value in values.items()]
    done = helm(
        "template", "kcoord", place, "--namespace=team", f"--kube-version={validation.latest_version()}", *given
    )
    assert done.returncode == 0, done.stderr
    return _by_name(list(yaml.safe_load_all(done.stdout)))


def _by_name(found: list[Object]) -> dict[tuple[str, str], Object]:
    assert len({(each["kind"], each["metadata"]["name"]) for each in found}) == len(found)
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


@pytest.mark.smoke
def test_without_values_it_is_the_base_but_for_secrets() -> None:
    wanted = _by_name([each for each in objects("base") if each["kind"] != "Secret"])
    found = chart()
    assert found["PersistentVolumeClaim", "kcoord-store"]["metadata"].pop("annotations") == {
        "helm.sh/resource-policy": "keep"
    }
    assert found == wanted


EVERYTHING: dict[str, str] = {
    "store__storageClass": "nfs",
    "store__size": "2Ti",
    "redis__image": "mirror.example.com/redis:8.10.2",
    "redis__maxmemory": "768",
    "signing__required": "true",
    "settings__KCOORD_MAX_WAIT": "60",
    "metrics__enabled": "true",
    "metrics__podMonitor": "true",
    "metrics__alerts": "true",
    "localDisk__path": "/scratch/kcoord",
    "localDisk__size": "1Ti",
    "inject__cpu": "500m",
    "inject__image": "registry.example.com/kcoord-agent:0.1.0",
}


@pytest.mark.parametrize("values", [{}, EVERYTHING, {**EVERYTHING, "redis__enabled": "false"}])
def test_every_object_is_valid_and_every_pod_keeps_its_promises(values: dict[str, str]) -> None:
    found = list(chart(**values).values())
    check(found)
    for each in found:
        if each["kind"] not in ("PodMonitor", "PrometheusRule"):
            validation.validate(each, validation.latest_version(), strict=True)


def test_each_value_says_what_it_says() -> None:
    before = chart()["ConfigMap", "kcoord-settings"]["data"]
    found = chart(**EVERYTHING)
    spec = found["PersistentVolumeClaim", "kcoord-store"]["spec"]
    assert (spec["storageClassName"], spec["resources"]["requests"]["storage"]) == ("nfs", "2Ti")
    (pod,) = pods(list(found.values()))
    (redis,) = pod.containers
    assert redis["image"] == EVERYTHING["redis__image"]
    assert redis["command"][redis["command"].index("--maxmemory") + 1] == "768mb"
    assert {redis["resources"][kind]["memory"] for kind in ("requests", "limits")} == {"1024Mi"}
    added = {"KCOORD_MAX_WAIT": "60", "KCOORD_TRUST": "require"}
    assert found["ConfigMap", "kcoord-settings"]["data"] == before | added
    volume = found["PersistentVolume", "kcoord-local-team"]["spec"]
    claim = found["PersistentVolumeClaim", "kcoord-local"]["spec"]
    assert volume["hostPath"] == {"path": "/scratch/kcoord", "type": "Directory"}
    assert volume["claimRef"] == {"namespace": "team", "name": "kcoord-local"}
    assert claim["volumeName"] == "kcoord-local-team"
    assert volume["capacity"] == claim["resources"]["requests"] == {"storage": "1Ti"}


def test_a_store_and_a_redis_may_be_there_already() -> None:
    kinds = {kind for kind, _ in chart(store__create="false", redis__enabled="false")}
    assert kinds == {"ConfigMap"}


def test_the_policy_is_that_of_the_manifests_with_this_namespaces_switches() -> None:
    found = chart(**EVERYTHING)
    applied = _by_name(objects(checkout() / "admission"))
    assert {key: found[key] for key in applied} == applied
    assert found["ConfigMap", "kcoord-inject"]["data"] == {
        "image": EVERYTHING["inject__image"],
        "cpu": "500m",
        "memory": "2Gi",
        "metrics": "true",
        "localClaim": "kcoord-local",
    }
    assert {kind for kind, _ in applied} == {*POLICY}
    assert not {*POLICY} & {kind for kind, _ in chart(**EVERYTHING, inject__policy="false")}
    older = chart(**EVERYTHING, inject__apiVersion="admissionregistration.k8s.io/v1beta1")
    for kind in POLICY:
        validation.validate(older[kind, "kcoord-agent"], "1.34", strict=True)


@pytest.mark.parametrize(
    "value", ["redis.enabld=false", "store.size=5", "settings.MAX_WAIT=60", "localDisk.path=here", "inject.cpu=two"]
)
def test_a_value_that_means_nothing_is_refused(value: str) -> None:
    done = helm("template", "kcoord", CHART, "--set", value)
    assert done.returncode != 0
    assert value.partition("=")[0].partition(".")[2] in done.stderr


def test_an_agent_needs_as_much_by_the_chart_the_policy_and_the_component() -> None:
    agent = next(pods(objects("indexed-job"))).container("kcoord-agent")
    data = chart(inject__image=EVERYTHING["inject__image"])["ConfigMap", "kcoord-inject"]["data"]
    assert {"cpu": data["cpu"], "memory": data["memory"]} == agent["resources"]["limits"]


def test_its_manifests_are_those_of_kustomize() -> None:
    """Copies: an archive of the repository may hold no links."""
    copies = {path.name: path for path in (CHART / "manifests").iterdir()}
    places = [path for path in (ROOT / "k8s").rglob("*") if path.name in copies and CHART not in path.parents]
    assert sorted(path.name for path in places) == sorted(copies)
    for path in places:
        assert path.read_text() == copies[path.name].read_text(), f"cp {path} {copies[path.name]}"


def test_a_package_of_this_version_renders_the_same_and_holds_no_secret(tmp_path: Path) -> None:
    import tarfile

    import yaml

    said = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert said["version"] == said["appVersion"] == kcoord.__version__
    done = helm("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    packed = tmp_path / f"kcoord-{kcoord.__version__}.tgz"
    assert chart(packed, **EVERYTHING) == chart(**EVERYTHING)
    with tarfile.open(packed) as package:
        files: dict[str, Any] = {each.name: each for each in package.getmembers()}
    assert files["kcoord/manifests/policy.yaml"].isfile()
    assert not [name for name in files if "secret" in name or "users.acl" in name]
    assert helm("lint", CHART).returncode == 0
