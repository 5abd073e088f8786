"""The manifests are valid, and say what `docs/kubernetes.md` says of them."""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

import kcoord
from kcoord.agent.metrics import BUCKETS, METRICS
from kcoord.agent.server import ENDS_WITHIN
from kcoord.artifacts.signing import read_keys
from kcoord.settings import PROTOCOL_VERSION, Settings
from kcoord_launch import supervise
from tests.cluster.k8s.manifests import (
    OVERLAYS,
    ROOT,
    WITH_SIDECAR,
    Object,
    Pod,
    checkout,
    environment,
    is_sidecar,
    kustomized,
    objects,
    pods,
)
from tests.cluster.k8s.promises import FILES, KNOWN, check, quality

validation = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
VERSIONS = ["1.29", validation.latest_version()]
_API = {
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "ClusterTrainingRuntime": "trainer.kubeflow.org/v1alpha1",
}
_OF_A_USER = "securityContext: {runAsNonRoot: true, runAsUser: 1000, fsGroup: 1000}"
_USERS = {"runAsUser", "runAsGroup", "fsGroup"}
_MINE = """\
apiVersion: batch/v1
kind: Job
metadata: {name: mine, labels: {kcoord/agent: sidecar}}
spec:
  template:
    spec:
      restartPolicy: Never
      initContainers: [{name: data, image: data:1}]
      containers: [{name: a, image: a:1}, {name: b, image: b:1, env: [{name: X, value: y}]}]
      volumes: [{name: data, emptyDir: {}}]
"""


def validate(found: list[Object]) -> None:
    """Strictly: an unknown field is an error. Of objects of other projects, whose schemas nobody ships, the pods."""
    for each, version in itertools.product(found, VERSIONS):
        try:
            validation.validate(each, version, strict=True)
        except validation.SchemaNotFoundError:
            for pod in pods([each]):
                made = {"apiVersion": "v1", "kind": "Pod", "metadata": pod.metadata, "spec": pod.spec}
                validation.validate(made, version, strict=True)


def of_kind(found: list[Object], kind: str) -> Object:
    (one,) = (each for each in found if each["kind"] == kind)
    return one


def pod_of(found: list[Object]) -> Pod:
    return next(pods(found))


def names(entries: list[Object]) -> list[str]:
    return [entry["name"] for entry in entries]


# --- the overlays ---


@pytest.mark.smoke
@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_every_object_is_valid_and_every_pod_keeps_its_promises(name: str) -> None:
    found = objects(name)
    assert found
    validate(found)
    check(found)


def test_what_overlays_name_is_in_the_base() -> None:
    there = {(each["kind"], each["metadata"]["name"]): each for each in objects("base")}
    for container, pod in ((c, p) for name in OVERLAYS for p in pods(objects(name)) for c in p.containers):
        for source in container.get("envFrom", []):
            assert ("ConfigMap", source["configMapRef"]["name"]) in there
        for name in FILES & environment(container).keys():
            path = Path(environment(container)[name]["value"])
            (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == str(path.parent))
            (secret,) = (v["secret"] for v in pod.spec["volumes"] if v["name"] == mount["name"])
            assert path.name in there["Secret", secret["secretName"]]["data"]
            assert path.name in [item["path"] for item in secret.get("items", [{"path": path.name}])]
        for volume in pod.spec["volumes"]:
            if "persistentVolumeClaim" in volume:
                claim = there["PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]]
                assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_settings_of_the_config_map_are_settings() -> None:
    (found,) = (each for each in objects("base") if each["metadata"]["name"] == "kcoord-settings")
    assert found["data"].keys() <= KNOWN
    Settings.from_environ(found["data"])


def test_only_pods_with_an_agent_reach_redis() -> None:
    found = objects("base")
    policy, service = of_kind(found, "NetworkPolicy")["spec"], of_kind(found, "Service")
    (redis,) = (pod for pod in pods(found) if pod.of["kind"] == "Deployment")
    assert policy["podSelector"]["matchLabels"] == service["spec"]["selector"]
    assert service["spec"]["selector"].items() <= redis.metadata["labels"].items()
    assert (policy["policyTypes"], policy["egress"]) == (["Ingress", "Egress"], [])
    ((peer,),) = (rule["from"] for rule in policy["ingress"])
    assert peer["podSelector"]["matchExpressions"] == [{"key": "kcoord/agent", "operator": "Exists"}]
    url = (checkout() / "base" / "secrets" / "redis-url").read_text()
    assert f"@{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/" in url


@pytest.mark.parametrize("name", WITH_SIDECAR)
def test_a_guaranteed_pod_stays_guaranteed_beside_its_agent(name: str) -> None:
    pod = pod_of(objects(name))
    assert quality(pod) == "Guaranteed"
    del pod.container("kcoord-agent")["resources"]["limits"]["cpu"]
    assert quality(pod) == "Burstable"


@pytest.mark.parametrize("name", WITH_SIDECAR)
def test_the_root_is_read_only_and_tmp_a_volume(name: str) -> None:
    """torchrun, Python and HOME write to /tmp, and nothing of kcoord's writes elsewhere but to its own volumes."""
    pod = pod_of(objects(name))
    for container in pod.containers:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        volumes = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        for variable in ("HOME", "KCOORD_LOCAL_DIR", "KCOORD_STORE"):
            path = Path(environment(container).get(variable, {"value": "/kcoord"})["value"])
            assert {str(path), *map(str, path.parents)} & volumes, (container["name"], variable)
    assert "/tmp" in {mount["mountPath"] for mount in pod.spec["containers"][0]["volumeMounts"]}


def bytes_of(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) << 30


def test_a_pods_own_copies_are_bounded_far_below_what_evicts_it() -> None:
    """The collector keeps what was used today, so a job of one day meets no bound but the volume's."""
    pod = pod_of(objects("indexed-job"))
    (volume,) = (each for each in pod.spec["volumes"] if each["name"] == "kcoord")
    bound = Settings.from_environ(of_kind(objects("base"), "ConfigMap")["data"]).local_max_size
    assert bound is not None
    assert bytes_of(volume["emptyDir"]["sizeLimit"]) == 2 * bound
    asked = pod.container("kcoord-agent")["resources"]["requests"]["ephemeral-storage"]
    assert 0 < bytes_of(asked) <= bound


# --- the components ---


@pytest.mark.parametrize("name", WITH_SIDECAR)
def test_the_component_adds_to_what_the_job_has_and_takes_nothing(name: str) -> None:
    import yaml

    (path,) = (p for p in (checkout() / "overlays" / name).glob("*.yaml") if p.stem in ("job", "jobset", "runtime"))
    before, after = pod_of(list(yaml.safe_load_all(path.read_text()))), pod_of(objects(name))
    (agent,) = after.spec["initContainers"]
    assert (agent["name"], is_sidecar(agent)) == ("kcoord-agent", True)
    for key, value in before.spec.items():
        assert key in ("containers", "volumes") or after.spec[key] == value
    for ours, theirs in zip(before.spec["containers"], after.spec["containers"], strict=True):
        assert theirs["command"] == ours["command"]
        assert [e for e in ours["env"] if e not in theirs["env"]] == []
        assert [m for m in ours.get("volumeMounts", []) if m not in theirs["volumeMounts"]] == []
        there = environment(theirs)
        assert there["KCOORD_SPAWN"]["value"] == "0"
        for variable in ("KCOORD_SOCKET", "KCOORD_LOCAL_DIR"):
            assert there[variable] == environment(agent)[variable]


def test_a_job_of_ones_own_keeps_its_init_containers_and_volumes_and_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(_MINE + "---\n" + _MINE.replace("mine", "other").replace("kcoord/agent", "else"))
    mine, other = kustomized(tmp_path, ["job.yaml"], "sidecar")
    spec = mine["spec"]["template"]["spec"]
    assert names(spec["initContainers"]) == ["data", "kcoord-agent"]
    assert names(spec["volumes"]) == ["data", "kcoord", "kcoord-store", "kcoord-secrets"]
    assert all("KCOORD_SOCKET" in environment(container) for container in spec["containers"])
    assert "kcoord" not in str(other).replace("'else': 'sidecar'", "")


@pytest.mark.parametrize("kind", _API)
def test_all_components_together_make_a_valid_pod_of_one_that_says_little(tmp_path: Path, kind: str) -> None:
    import yaml

    within = {"Job": "spec", "JobSet": "spec/replicatedJobs/0/template/spec"}
    place = within.get(kind, "spec/template/spec/replicatedJobs/0/template/spec")
    spec: Any = yaml.safe_load(_MINE.replace("restartPolicy", f"{_OF_A_USER}\n      restartPolicy"))["spec"]
    for name in reversed(place.split("/")):
        spec = [{"name": "node", **spec}] if name == "0" else {name: spec}
    mine = {"apiVersion": _API[kind], "kind": kind, "metadata": {"name": "mine", "labels": {"kcoord/agent": "sidecar"}}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(mine | spec))
    components = ("sidecar", "metrics", "local-disk", "signed", "openshift")
    found = kustomized(tmp_path, ["mine.yaml"], *components)
    validate(found)
    pod = pod_of(found)
    assert names(pod.containers) == ["data", "kcoord-agent", "a", "b"]
    assert pod.metadata["labels"] == {"kcoord/agent": "sidecar"}
    assert pod.spec["securityContext"] == {"runAsNonRoot": True}, "OpenShift chooses the user"
    for container in pod.containers[1:]:
        variables = environment(container)
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert (mounts["/kcoord-local"], mounts["/kcoord"]) == ("kcoord-local", "kcoord")
        assert variables["KCOORD_LOCAL_DIR"]["value"] == "/kcoord-local/node"
        assert variables.get("KCOORD_SOCKET", {}).get("value") in (None, "/kcoord/node/agent.sock")
        assert ("KCOORD_LOCAL_MAX_SIZE" in variables) == (container["name"] == "kcoord-agent")
        ours = container["name"].startswith("kcoord-")
        assert variables.get("KCOORD_TRUST", {}).get("value") == ("require" if ours else None), "others have no key"
    assert "kcoord" not in str(pod.container("data"))


@pytest.mark.parametrize("security", ["", _OF_A_USER])
def test_where_openshift_chooses_the_user_nothing_asks_for_one(tmp_path: Path, security: str) -> None:
    (tmp_path / "job.yaml").write_text(_MINE.replace("restartPolicy", f"{security}\n      restartPolicy"))
    ours = [checkout() / "base", checkout() / "overlays" / "gc"]
    found = kustomized(tmp_path, ["job.yaml", *ours], "sidecar", "openshift")
    validate(found)
    for pod in pods(found):
        assert not _USERS & pod.spec.get("securityContext", {}).keys(), pod.name


def test_the_claim_of_a_nodes_disk_is_bound_to_its_volume() -> None:
    volume, claim = sorted(objects(checkout() / "local-disk"), key=lambda each: each["kind"])
    validate([volume, claim])
    assert volume["spec"]["claimRef"] == {"namespace": "default", "name": claim["metadata"]["name"]}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["accessModes"] == claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


def test_prometheus_finds_the_port_that_the_sidecar_serves(tmp_path: Path) -> None:
    found = kustomized(tmp_path, [checkout() / "overlays" / "indexed-job"], "monitoring", "metrics")
    monitor = of_kind(found, "PodMonitor")["spec"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    (pod,) = pods([of_kind(found, "Job")])
    assert monitor["selector"]["matchLabels"].items() <= pod.metadata["labels"].items()
    agent, *others = pod.containers
    (port,) = (each for each in agent["ports"] if each["name"] == endpoint["port"])
    metrics = Settings.from_environ({"KCOORD_METRICS": environment(agent)["KCOORD_METRICS"]["value"]}).metrics
    assert metrics == f"0.0.0.0:{port['containerPort']}"
    assert not [each["name"] for each in others if "KCOORD_METRICS" in environment(each)]


def test_the_store_is_bounded_below_its_claim() -> None:
    """A full volume would keep new kernels on their nodes."""
    (claim,) = (each for each in objects("base") if each["metadata"]["name"] == "kcoord-store")
    settings = dict(
        line.split("=") for line in (ROOT / "k8s" / "base" / "settings.env").read_text().splitlines() if line[0] != "#"
    )
    most = Settings.from_environ(settings).store_max_size
    assert claim["spec"]["resources"]["requests"]["storage"] == "100Gi"
    assert most == 80 << 30


def test_each_alert_asks_for_metrics_and_labels_that_there_are(tmp_path: Path) -> None:
    """`page` or `ticket`; each alert says in one line who has lost what."""
    parser = pytest.importorskip("promql_parser", reason="pip install promql-parser")
    found = kustomized(tmp_path, [checkout() / "overlays" / "indexed-job"], "monitoring", "metrics")
    (group,) = of_kind(found, "PrometheusRule")["spec"]["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) == 10
    for rule in group["rules"]:
        parser.parse(rule["expr"])  # raises ValueError
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"].endswith(".")
        for name, labels in re.findall(r"\b(kcoord_\w+)(?:\{([^}]*)\})?", rule["expr"]):
            metric = re.sub("_(bucket|count|sum)$", "", name)
            assert metric in METRICS, rule
            asked = set(re.findall(r"(\w+)=", labels)) - {"le"}
            assert asked <= set(METRICS[metric][0]), rule
            assert ('le="' not in labels) or any(f'le="{bound}"' in labels for bound in BUCKETS), rule


# --- secrets, and figures that several places name ---


def test_the_agents_image_has_this_version_wherever_it_is_named() -> None:
    """One that was forgotten is an agent of another version than the trainer's kcoord."""
    pages = [ROOT / "Containerfile", ROOT / "docs" / "kubernetes.md", *(ROOT / "k8s").rglob("*.yaml")]
    said = [v for page in pages for v in re.findall(r"kcoord-agent(?::|, newTag: )([\d.]+)", page.read_text())]
    assert len(said) >= 8
    assert {*said} == {kcoord.__version__}


def test_the_page_says_which_versions_work_together() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert f"protocol ({PROTOCOL_VERSION} in {kcoord.__version__})" in page


def test_what_is_said_of_the_agents_end_is_what_the_agent_does() -> None:
    """Wherever somebody reads how long it takes, to choose a pod's grace period."""
    pages = [*(ROOT / "k8s").rglob("*.yaml"), ROOT / "k8s" / "README.md", *(ROOT / "docs").glob("*.md")]
    said = [number for page in pages for number in re.findall(r"ends within (\d+) s", page.read_text())]
    assert len(said) >= 5
    assert {*said} == {f"{ENDS_WITHIN:g}"}
    assert ENDS_WITHIN < supervise._STOP_TIMEOUT, "a launcher does not kill an agent that ends in time"


def test_nothing_can_be_applied_before_there_are_secrets(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s", ignore=shutil.ignore_patterns("secrets"))
    done = subprocess.run(["kubectl", "kustomize", tmp_path / "k8s" / "base"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "secrets/" in done.stderr
    assert "/k8s/base/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_secrets_are_private_random_and_made_once(tmp_path: Path) -> None:
    make = ROOT / "k8s" / "make-secrets.sh"
    for directory in ("a", "b"):
        subprocess.run([make, tmp_path / directory], check=True, capture_output=True)
    made = {path.name for path in (tmp_path / "a").iterdir()}
    assert made == {"redis-url", "users.acl", "signing-key"}
    for name in made:
        first, second = (tmp_path / d / name for d in ("a", "b"))
        assert first.read_text() != second.read_text()
        assert first.stat().st_mode & 0o777 == 0o600
    url = (tmp_path / "a" / "redis-url").read_text()
    given = {"KCOORD_REDIS_URL_FILE": str(tmp_path / "a" / "redis-url")}
    assert Settings.from_environ(given).redis_address() == url
    assert len(read_keys(tmp_path / "a" / "signing-key")) == 1
    password = url.partition("kcoord:")[2].partition("@")[0]
    assert len(password) == 64
    assert password not in (tmp_path / "a" / "users.acl").read_text()
    again = subprocess.run([make, tmp_path / "a"], capture_output=True, text=True)
    assert again.returncode == 1
    assert "there already" in again.stderr


def test_where_a_program_is_missing_no_secret_is_made(tmp_path: Path) -> None:
    """A user without a password's hash would keep Redis from starting, much later."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "od", "tr", "cut", "date", "mkdir", "cat", "dirname"):  # no sha256sum, as on some Macs
        found = shutil.which(name)
        assert found is not None
        (programs / name).symlink_to(found)
    make = ["sh", ROOT / "k8s" / "make-secrets.sh", tmp_path / "secrets"]
    done = subprocess.run(make, capture_output=True, text=True, env={"PATH": str(programs)})
    assert done.returncode == 1
    assert "sha256sum" in done.stderr.splitlines()[-1]
    assert list((tmp_path / "secrets").iterdir()) == []
