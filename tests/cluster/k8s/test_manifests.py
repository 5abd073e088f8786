"""The manifests are valid, and say what ours must say. A schema passes much: each rule is shown to refuse something."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kcoord
from kcoord.agent.server import ENDS_WITHIN
from kcoord.artifacts.signing import read_keys
from kcoord.cli import _COMMANDS
from kcoord.settings import Settings
from kcoord_launch import supervise
from tests.cluster.k8s.lint import FILES, complaints
from tests.cluster.k8s.manifests import (
    OVERLAYS,
    ROOT,
    WITH_SIDECAR,
    Object,
    checkout,
    environment,
    is_sidecar,
    objects,
    pods,
    rendered,
)

validation = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
VERSIONS = ["1.29", "1.33", validation.latest_version()]
EVERYTHING = ["base", *OVERLAYS]


def validate(each: Object, version: str) -> None:
    """Strictly: an unknown field is an error. Of another project's objects, the pods; what else they have, the lint knows."""
    try:
        validation.validate(each, version, strict=True)
    except validation.SchemaNotFoundError:
        for pod in pods([each]):
            made = {"apiVersion": "v1", "kind": "Pod", "metadata": pod.metadata, "spec": pod.spec}
            validation.validate(made, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", EVERYTHING)
def test_every_object_is_valid(name: str, version: str) -> None:
    found = objects(name)
    assert found
    for each in found:
        validate(each, version)


@pytest.mark.smoke
def test_validation_is_strict() -> None:
    (job,) = (each for each in objects("indexed-job") if each["kind"] == "Job")
    job["spec"]["template"]["spec"]["initContainers"][0]["restartPolciy"] = "Always"
    with pytest.raises(validation.ValidationError):
        validate(job, VERSIONS[-1])
    (jobset,) = objects("jobset")
    next(pods([jobset])).spec["containers"][0]["imagee"] = "x"
    with pytest.raises(validation.ValidationError):
        validate(jobset, VERSIONS[-1])


@pytest.mark.parametrize("name", EVERYTHING)
def test_no_rule_of_ours_is_broken(name: str) -> None:
    if name == "gc" and "gc" not in _COMMANDS:
        pytest.skip("this kcoord has no gc command")
    assert complaints(objects(name)) == []


def pod_of(name: str) -> tuple[list[Object], Any]:
    found = objects(name)
    return found, next(pods(found))


def _trainer(pod: Any) -> Object:
    return next(c for c in pod.spec["containers"])


def _agent(pod: Any) -> Object:
    return next(c for c in pod.spec["initContainers"] if is_sidecar(c))


def _secret_mount(container: Object) -> Object:
    return next(m for m in container["volumeMounts"] if m["name"] == "kcoord-secrets")


def _secret_volume(pod: Any) -> Object:
    found: Object = next(v["secret"] for v in pod.spec["volumes"] if v["name"] == "kcoord-secrets")
    return found


BROKEN: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("indexed-job", "restartPolicy must be", lambda pod: pod.spec.update(restartPolicy="Always")),
    ("jobset", "restartPolicy must be", lambda pod: pod.spec.update(restartPolicy="Always")),
    ("indexed-job", "enableServiceLinks", lambda pod: pod.spec.pop("enableServiceLinks")),
    ("indexed-job", "automountServiceAccountToken", lambda pod: pod.spec.pop("automountServiceAccountToken")),
    ("indexed-job", "what is the host's", lambda pod: pod.spec.update(hostNetwork=True)),
    ("jobset", "kind hostPath",
     lambda pod: pod.spec["volumes"].append({"name": "disk", "hostPath": {"path": "/mnt"}})),
    ("base", "safe-to-evict", lambda pod: pod.metadata.pop("annotations")),
    ("indexed-job", "runAsNonRoot and seccompProfile", lambda pod: pod.spec.pop("securityContext")),
    ("indexed-job", "terminationGracePeriodSeconds", lambda pod: pod.spec.update(terminationGracePeriodSeconds=30)),
    ("indexed-job", "there is no volume kcoord", lambda pod: pod.spec.update(volumes=[])),
    ("indexed-job", "is not pinned", lambda pod: _trainer(pod).update(image="trainer:latest")),
    ("indexed-job", "is not pinned", lambda pod: _trainer(pod).update(image="registry:5000/trainer")),
    ("indexed-job", "resources are not set", lambda pod: _agent(pod).pop("resources")),
    ("indexed-job", "readOnlyRootFilesystem", lambda pod: _agent(pod)["securityContext"].pop("readOnlyRootFilesystem")),
    ("jobset", "capabilities", lambda pod: _trainer(pod)["securityContext"].pop("capabilities")),
    ("jobset", "a user of its own", lambda pod: _trainer(pod)["securityContext"].update(runAsUser=1000)),
    ("jobset", "no setting KCOORD_STOER", lambda pod: _trainer(pod)["env"].append({"name": "KCOORD_STOER", "value": "/"})),
    ("jobset", "secret of the agent's",
     lambda pod: _trainer(pod)["env"].append(environment(_agent(pod))["KCOORD_REDIS_URL_FILE"])),
    ("jobset", "it must be a file",
     lambda pod: _agent(pod)["env"].append({"name": "KCOORD_REDIS_URL", "value": "redis://:x@y"})),
    ("jobset", "a secret in the environment",
     lambda pod: _agent(pod)["env"].append({"name": "X", "valueFrom": {"secretKeyRef": {"name": "kcoord-agent", "key": "x"}}})),
    ("jobset", "kcoord-secrets is the agent's alone",
     lambda pod: _trainer(pod)["volumeMounts"].append(_secret_mount(_agent(pod)))),
    ("indexed-job", "must be mounted readOnly", lambda pod: _secret_mount(_agent(pod)).pop("readOnly")),
    ("indexed-job", "new keys never come in", lambda pod: _secret_mount(_agent(pod)).update(subPath="signing-key")),
    ("indexed-job", "in no mounted Secret", lambda pod: _secret_mount(_agent(pod)).update(mountPath="/secrets")),
    ("indexed-job", "defaultMode 0440", lambda pod: _secret_volume(pod).pop("defaultMode")),
    ("trainjob", "defaultMode 0440", lambda pod: pod.spec["securityContext"].pop("fsGroup")),
    ("gc", "keep the pod from starting", lambda pod: _secret_volume(pod).update(optional=False)),
    ("trainjob", "No such option", lambda pod: _agent(pod).update(command=["kcoord", "agent", "--sidecart"])),
    ("trainjob", "no command kcoord agnet", lambda pod: _agent(pod).update(command=["kcoord", "agnet"])),
    ("trainjob", "readiness probe", lambda pod: _agent(pod).update(readinessProbe=_agent(pod)["livenessProbe"])),
    ("trainjob", "must succeed in the end", lambda pod: _agent(pod).update(startupProbe=_agent(pod)["livenessProbe"])),
    ("trainjob", "does not reach Redis", lambda pod: pod.metadata["labels"].pop("kcoord/agent")),
    ("trainjob", "a volume's root", lambda pod: _agent(pod)["env"][1].update(value="/kcoord")),
    ("trainjob", "is in no volume", lambda pod: _agent(pod)["env"][0].update(value="/data")),
]  # fmt: skip


@pytest.mark.parametrize(("name", "said", "damage"), BROKEN, ids=[f"{n}: {s}" for n, s, _ in BROKEN])
def test_each_rule_refuses_something(name: str, said: str, damage: Callable[[Any], Any]) -> None:
    found, pod = pod_of(name)
    damage(pod)
    lines = complaints(found)
    assert [line for line in lines if said in line], lines


def test_unknown_fields_of_other_projects_objects_are_refused() -> None:
    found = objects("trainjob")
    (job,) = (each for each in found if each["kind"] == "TrainJob")
    job["spec"]["trainer"]["numProcsPerNode"] = 8
    assert complaints(found) == ["TrainJob train: spec.trainer has no field numProcsPerNode"]


@pytest.mark.parametrize("name", WITH_SIDECAR)
def test_the_component_adds_to_what_the_job_has_and_takes_nothing(name: str) -> None:
    import yaml

    (path,) = [
        p
        for p in (checkout() / "overlays" / name).glob("*.yaml")
        if p.name in ("job.yaml", "jobset.yaml", "runtime.yaml")
    ]
    before = next(pods(list(yaml.safe_load_all(path.read_text()))))
    after = next(pods(objects(name)))
    assert [c["name"] for c in after.spec["initContainers"]] == ["kcoord-agent", "kcoord-prefetch"]
    assert is_sidecar(after.spec["initContainers"][0])
    assert not is_sidecar(after.spec["initContainers"][1])
    for key, value in before.spec.items():
        if key not in ("containers", "volumes"):
            assert after.spec[key] == value
    for ours, theirs in zip(before.spec["containers"], after.spec["containers"], strict=True):
        assert theirs["command"] == ours["command"]
        assert [e for e in ours["env"] if e not in theirs["env"]] == []
        assert [m for m in ours.get("volumeMounts", []) if m not in theirs["volumeMounts"]] == []
        there = environment(theirs)
        assert there["KCOORD_SPAWN"]["value"] == "0"
        for variable in ("KCOORD_SOCKET", "KCOORD_LOCAL_DIR"):
            assert there[variable]["value"] == environment(after.spec["initContainers"][0])[variable]["value"]


def test_a_job_of_ones_own_keeps_its_init_containers_and_volumes_and_others_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [job.yaml]\ncomponents: [{_relative(tmp_path, 'sidecar')}]\n"
    )
    (tmp_path / "job.yaml").write_text(_MINE + "---\n" + _MINE.replace("mine", "other").replace("kcoord/agent", "else"))
    mine, other = objects(tmp_path)
    assert [c["name"] for c in mine["spec"]["template"]["spec"]["initContainers"]] == [
        "data",
        "kcoord-agent",
        "kcoord-prefetch",
    ]
    assert [v["name"] for v in mine["spec"]["template"]["spec"]["volumes"]] == [
        "data",
        "kcoord",
        "kcoord-store",
        "kcoord-secrets",
    ]
    for container in mine["spec"]["template"]["spec"]["containers"]:
        assert "KCOORD_SOCKET" in environment(container)
    assert "kcoord" not in str(other).replace("'else': 'sidecar'", "")


def test_the_optional_component_fits_every_kind(tmp_path: Path) -> None:
    for name in WITH_SIDECAR:
        place = tmp_path / name
        place.mkdir()
        overlay = Path(_relative(place, "sidecar")).parent.parent / "overlays" / name
        (place / "kustomization.yaml").write_text(
            f"resources: [{overlay}]\ncomponents: [{_relative(place, 'openshift')}]\n"
        )
        found = objects(place)
        pod = next(pods(found))
        assert not _USERS & pod.spec["securityContext"].keys()
        for each in found:
            validate(each, VERSIONS[0])


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainingRuntime", "ClusterTrainingRuntime"])
def test_what_the_components_make_of_a_pod_that_says_little_is_valid(tmp_path: Path, kind: str) -> None:
    (mine,) = _made_by(tmp_path, kind, "sidecar", "metrics")
    for version in VERSIONS:
        validate(mine, version)
    pod = next(pods([mine]))
    assert [c["name"] for c in pod.containers[:3]] == ["data", "kcoord-agent", "kcoord-prefetch"]
    assert pod.metadata["labels"] == {"kcoord/agent": "sidecar"}


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainingRuntime", "ClusterTrainingRuntime"])
def test_on_a_disk_of_the_node_are_the_copies_and_not_the_socket(tmp_path: Path, kind: str) -> None:
    (mine,) = _made_by(tmp_path, kind, "sidecar", "local-disk")
    for version in VERSIONS:
        validate(mine, version)
    pod = next(pods([mine]))
    claims = {v["name"]: v.get("persistentVolumeClaim", {}).get("claimName") for v in pod.spec["volumes"]}
    assert claims["kcoord-local"] == "kcoord-local"
    for name in ("kcoord-agent", "kcoord-prefetch", *(c["name"] for c in pod.spec["containers"])):
        container = pod.container(name)
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        assert mounts["/kcoord-local"] == "kcoord-local"
        assert mounts["/kcoord"] == "kcoord"
        assert environment(container)["KCOORD_LOCAL_DIR"]["value"] == "/kcoord-local/node"
        assert environment(container).get("KCOORD_SOCKET", {}).get("value") in (None, "/kcoord/node/agent.sock")
        assert ("KCOORD_LOCAL_MAX_SIZE" in environment(container)) == (name == "kcoord-agent")
    assert "kcoord-local" not in str(pod.container("data"))


def test_the_claim_of_a_nodes_disk_is_bound_to_its_volume() -> None:
    volume, claim = sorted(objects(checkout() / "local-disk"), key=lambda each: each["kind"])
    for each in (volume, claim):
        for version in VERSIONS:
            validate(each, version)
    assert volume["spec"]["claimRef"] == {"namespace": "default", "name": claim["metadata"]["name"]}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert volume["spec"]["accessModes"] == claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert volume["spec"]["persistentVolumeReclaimPolicy"] == "Retain"


def _made_by(directory: Path, kind: str, *components: str) -> list[Object]:
    """A pod that says little, as an object of `kind`, with `components`."""
    named = ", ".join(_relative(directory, c) for c in components)
    (directory / "kustomization.yaml").write_text(f"resources: [mine.yaml]\ncomponents: [{named}]\n")
    job = _MINE.partition("spec:\n")[2]
    within = {"Job": "spec", "JobSet": "spec/replicatedJobs/0/template/spec"}
    place = within.get(kind, "spec/template/spec/replicatedJobs/0/template/spec").split("/")
    head = f"apiVersion: {_API[kind]}\nkind: {kind}\nmetadata: {{name: mine, labels: {{kcoord/agent: sidecar}}}}\n"
    (directory / "mine.yaml").write_text(head + _nested(place, job))
    return objects(directory)


@pytest.mark.parametrize("kind", ["Job", "JobSet", "TrainingRuntime", "ClusterTrainingRuntime"])
def test_where_signatures_are_required_no_setting_and_no_missing_secret_turns_them_off(
    tmp_path: Path, kind: str
) -> None:
    (mine,) = _made_by(tmp_path, kind, "sidecar", "signed")
    for version in VERSIONS:
        validate(mine, version)
    pod = next(pods([mine]))
    for name in ("kcoord-agent", "kcoord-prefetch"):  # its own variable wins over the ConfigMap's
        assert environment(pod.container(name))["KCOORD_TRUST"] == {"name": "KCOORD_TRUST", "value": "require"}
    assert "KCOORD_TRUST" not in environment(_trainer(pod)), "it has no key"


def _nested(place: list[str], body: str) -> str:
    """`body`, YAML that is indented by two, at `place`."""
    import yaml

    found: Any = yaml.safe_load(body)
    for name in reversed(place):
        found = [{"name": "node", **found}] if name == "0" else {name: found}
    return str(yaml.safe_dump(found))


@pytest.mark.parametrize("security", ["", "securityContext: {runAsNonRoot: true, runAsUser: 1000, fsGroup: 1000}"])
def test_where_openshift_chooses_the_user_a_job_may_ask_for_one_or_not(tmp_path: Path, security: str) -> None:
    components = ", ".join(_relative(tmp_path, c) for c in ("sidecar", "openshift"))
    (tmp_path / "kustomization.yaml").write_text(f"resources: [job.yaml]\ncomponents: [{components}]\n")
    (tmp_path / "job.yaml").write_text(_MINE.replace("restartPolicy", f"{security}\n      restartPolicy"))
    (mine,) = objects(tmp_path)
    assert not _USERS & next(pods([mine])).spec.get("securityContext", {}).keys()
    validate(mine, VERSIONS[0])


@pytest.mark.parametrize("name", ["base", "gc"])
def test_where_openshift_chooses_the_user_nothing_of_ours_asks_for_one(tmp_path: Path, name: str) -> None:
    ours = Path(_relative(tmp_path, "openshift")).parent.parent / ("base" if name == "base" else f"overlays/{name}")
    (tmp_path / "kustomization.yaml").write_text(
        f"resources: [{ours}]\ncomponents: [{_relative(tmp_path, 'openshift')}]\n"
    )
    found = objects(tmp_path)
    (pod,) = pods(found)
    assert pod.spec["securityContext"]["runAsNonRoot"] is True
    assert not _USERS & pod.spec["securityContext"].keys()
    for each in found:
        validate(each, VERSIONS[0])


def test_the_agents_image_has_this_version_wherever_it_is_named() -> None:
    """One that was forgotten is an agent of another version than the trainer's kcoord."""
    pages = [ROOT / "Containerfile", ROOT / "docs" / "kubernetes.md", *(ROOT / "k8s").rglob("*.yaml")]
    said = [v for page in pages for v in re.findall(r"kcoord-agent(?::|, newTag: )([\d.]+)", page.read_text())]
    assert len(said) >= 8
    assert {*said} == {kcoord.__version__}


def test_nothing_can_be_applied_before_there_are_secrets(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "k8s", tmp_path / "k8s", ignore=shutil.ignore_patterns("secrets"))
    done = subprocess.run(["kubectl", "kustomize", tmp_path / "k8s" / "base"], capture_output=True, text=True)
    assert done.returncode != 0
    assert "secrets/" in done.stderr


def test_secrets_are_private_random_and_made_once(tmp_path: Path) -> None:
    make = ROOT / "k8s" / "make-secrets.sh"
    for directory in ("a", "b"):
        subprocess.run([make, tmp_path / directory], check=True, capture_output=True)
    names = {path.name for path in (tmp_path / "a").iterdir()}
    assert names == {"redis-url", "users.acl", "signing-key"}
    for name in names:
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


def test_no_secret_is_in_the_repository() -> None:
    assert "/k8s/base/secrets/" in (ROOT / ".gitignore").read_text().splitlines()


def test_settings_of_the_config_map_are_settings() -> None:
    (found,) = (
        each
        for each in objects("base")
        if each["kind"] == "ConfigMap" and each["metadata"]["name"] == "kcoord-settings"
    )
    from tests.cluster.k8s.lint import KNOWN

    assert found["data"].keys() <= KNOWN
    Settings.from_environ(found["data"])


def test_what_overlays_name_is_in_the_base() -> None:
    there = {(each["kind"], each["metadata"]["name"]): each for each in objects("base")}
    for name in OVERLAYS:
        for pod in pods(objects(name)):
            for container in pod.containers:
                for source in container.get("envFrom", []):
                    assert ("ConfigMap", source["configMapRef"]["name"]) in there
                for name in FILES:
                    if name in environment(container):
                        path = Path(environment(container)[name]["value"])
                        (mount,) = (m for m in container["volumeMounts"] if m["mountPath"] == str(path.parent))
                        (secret,) = (v["secret"] for v in pod.spec["volumes"] if v["name"] == mount["name"])
                        assert path.name in there["Secret", secret["secretName"]]["data"]
                        assert path.name in [item["path"] for item in secret.get("items", [{"path": path.name}])]
            for volume in pod.spec["volumes"]:
                if "persistentVolumeClaim" in volume:
                    claim = there["PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]]
                    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_only_pods_with_an_agent_reach_redis() -> None:
    found = objects("base")
    (policy,) = (each for each in found if each["kind"] == "NetworkPolicy")
    (redis,) = (pod for pod in pods(found) if pod.of["kind"] == "Deployment")
    (service,) = (each for each in found if each["kind"] == "Service")
    selected = policy["spec"]["podSelector"]["matchLabels"]
    assert selected == service["spec"]["selector"]
    assert selected.items() <= redis.metadata["labels"].items()
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert policy["spec"]["egress"] == []
    (rule,) = policy["spec"]["ingress"]
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchExpressions"] == [{"key": "kcoord/agent", "operator": "Exists"}]
    url = (checkout() / "base" / "secrets" / "redis-url").read_text()
    assert f"@{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/" in url


def test_what_is_said_of_the_agents_end_is_what_the_agent_does() -> None:
    """Wherever somebody reads how long it takes, to choose a pod's grace period."""
    pages = [*(ROOT / "k8s").rglob("*.yaml"), ROOT / "k8s" / "README.md", *(ROOT / "docs").glob("*.md")]
    said = [number for page in pages for number in re.findall(r"ends within (\d+) s", page.read_text())]
    assert len(said) >= 5
    assert {*said} == {f"{ENDS_WITHIN:g}"}
    assert ENDS_WITHIN < supervise._STOP_TIMEOUT, "a launcher does not kill an agent that ends in time"


def test_rendering_is_the_same_each_time() -> None:
    path = checkout() / "overlays" / "indexed-job"
    first = rendered(path)
    rendered.cache_clear()
    assert rendered(path) == first
    assert copy.deepcopy(objects("indexed-job")) == objects("indexed-job")


def _relative(place: Path, component: str) -> str:
    import os

    return os.path.relpath(checkout() / "components" / component, place)


_API = {
    "Job": "batch/v1",
    "JobSet": "jobset.x-k8s.io/v1alpha2",
    "TrainingRuntime": "trainer.kubeflow.org/v1alpha1",
    "ClusterTrainingRuntime": "trainer.kubeflow.org/v1alpha1",
}
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
