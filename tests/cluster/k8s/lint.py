"""What must hold of our manifests and a schema does not know: `complaints` about objects, each a line."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import click

from kcoord import settings
from kcoord.agent.server import ENDS_WITHIN
from kcoord.cli import _COMMANDS
from kcoord.settings import FIELDS, variable
from tests.cluster.k8s.manifests import Object, Pod, environment, is_sidecar, jobs, pods

SECRETS = tuple(map(variable, settings.SECRETS))
FILES = tuple(map(variable, settings.SECRET_FILES))
KNOWN = {variable(field.name) for field in FIELDS}
OURS = ("kcoord-agent", "kcoord-prefetch", "gc")
"""The containers of the agent's image."""
SECRET = "kcoord-agent"
_GRACE = 30 + ENDS_WITHIN  # seconds: Kubernetes' own for the trainer, and after it the agent's
_PINNED = re.compile(r".+:[^:@/]*\d[^:@/]*(@sha256:[0-9a-f]{64})?|.+@sha256:[0-9a-f]{64}")
_RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}

_REPLICA = {"replicas": int, "restartPolicy": str, "template": dict}

# Fields of other projects' objects that we use, as their CRDs have them: JobSet v0.12, Kubeflow Trainer v2.2. Those of recipes
# are as these projects' documentation and code have them.
_CUSTOM: dict[str, dict[str, Any]] = {
    "jobset.x-k8s.io/v1alpha2 JobSet": {
        "network": {"enableDNSHostnames": bool, "publishNotReadyAddresses": bool, "subdomain": str},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{"name": str, "replicas": int, "template": dict}],
    },
    "trainer.kubeflow.org/v1alpha1 ClusterTrainingRuntime": {
        "mlPolicy": {"numNodes": int, "torch": {}},
        "template": {"spec": {"replicatedJobs": [{"name": str, "replicas": int, "template": dict}]}},
    },
    "trainer.kubeflow.org/v1alpha1 TrainJob": {
        "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
        "trainer": {"numNodes": int, "numProcPerNode": int, "command": [str], "args": [str], "env": list, "image": str},
    },
    "kubeflow.org/v1 PyTorchJob": {"pytorchReplicaSpecs": {"Master": _REPLICA, "Worker": _REPLICA}},
    "kubeflow.org/v2beta1 MPIJob": {
        "slotsPerWorker": int,
        "sshAuthMountPath": str,
        "runPolicy": {"cleanPodPolicy": str},
        "mpiReplicaSpecs": {"Launcher": _REPLICA, "Worker": _REPLICA},
    },
    "leaderworkerset.x-k8s.io/v1 LeaderWorkerSet": {
        "replicas": int,
        "leaderWorkerTemplate": {"size": int, "restartPolicy": str, "workerTemplate": dict},
    },
    "batch.volcano.sh/v1alpha1 Job": {
        "schedulerName": str,
        "minAvailable": int,
        "plugins": {"svc": [str]},
        "policies": [{"event": str, "action": str}],
        "tasks": [{"name": str, "replicas": int, "policies": [{"event": str, "action": str}], "template": dict}],
    },
    "ray.io/v1 RayJob": {
        "entrypoint": str,
        "shutdownAfterJobFinishes": bool,
        "rayClusterSpec": {
            "headGroupSpec": {"rayStartParams": dict, "template": dict},
            "workerGroupSpecs": [
                {
                    "groupName": str,
                    "replicas": int,
                    "minReplicas": int,
                    "maxReplicas": int,
                    "rayStartParams": dict,
                    "template": dict,
                }
            ],
        },
    },
}
_DECIDES_ITSELF = {"PyTorchJob", "MPIJob", "LeaderWorkerSet", "RayJob"}
"""Kinds whose controllers set their pods' restartPolicy."""


def complaints(found: list[Object]) -> list[str]:
    lines = [line for each in found for line in _of_object(each)]
    for pod in pods(found):
        lines += [f"{pod.name}: {line}" for line in _of_pod(pod)]
        for container in pod.containers:
            name = f"{pod.name}, {container['name']}"
            lines += [f"{name}: {line}" for line in _of_container(pod, container)]
    return lines


def _of_object(each: Object) -> Iterator[str]:
    name = f"{each['kind']} {each['metadata']['name']}"
    schema = _CUSTOM.get(f"{each['apiVersion']} {each['kind']}")
    if schema is not None:
        yield from (f"{name}: {line}" for line in _unlike(each["spec"], schema, "spec"))
    for job in jobs(each) if each["kind"] not in _DECIDES_ITSELF else ():
        if job["template"]["spec"].get("restartPolicy") not in ("Never", "OnFailure"):
            yield f"{name}: a Job's restartPolicy must be Never or OnFailure"
    if each["kind"] == "Service":
        if re.match(r"kcoord", each["metadata"]["name"]):
            yield f"{name}: it would put KCOORD_… variables into every pod"
        if each["spec"].get("clusterIP") == "None" and not each["spec"].get("publishNotReadyAddresses"):
            yield f"{name}: ranks look for each other before their pods are ready"


def _unlike(value: Any, schema: Any, where: str) -> Iterator[str]:
    if isinstance(schema, type):
        if not isinstance(value, schema) or (schema is int and isinstance(value, bool)):
            yield f"{where} must be {schema.__name__}"
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{where} must be a list"
        else:
            for number, item in enumerate(value):
                yield from _unlike(item, schema[0], f"{where}[{number}]")
    elif not isinstance(value, dict):
        yield f"{where} must be an object"
    else:
        for name, inner in value.items():
            if name not in schema:
                yield f"{where} has no field {name}"
            else:
                yield from _unlike(inner, schema[name], f"{where}.{name}")


def _of_pod(pod: Pod) -> Iterator[str]:
    spec = pod.spec
    if spec.get("enableServiceLinks") is not False:
        yield "enableServiceLinks must be false"
    if spec.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken must be false: nothing here asks the API server"
    evicted = pod.metadata.get("annotations", {}).get("cluster-autoscaler.kubernetes.io/safe-to-evict")
    if pod.of["kind"] == "Deployment" and any("emptyDir" in v for v in spec.get("volumes", [])) and evicted != "true":
        yield "without the annotation safe-to-evict its emptyDir keeps its node from being scaled down"
    security = spec.get("securityContext", {})
    if security.get("runAsNonRoot") is not True or security.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "the pod's securityContext must say runAsNonRoot and seccompProfile RuntimeDefault"
    if any(is_sidecar(c) for c in pod.containers) and spec.get("terminationGracePeriodSeconds", 30) < _GRACE:
        yield f"terminationGracePeriodSeconds must leave the agent {ENDS_WITHIN:g} s: {_GRACE:g} at least"
    for volume in spec.get("volumes", []):
        if volume.get("secret", {}).get("secretName") == SECRET:
            if volume["secret"].get("defaultMode") != 0o440 or "fsGroup" not in security:
                yield f"{volume['name']}: the agent refuses what others may read: defaultMode 0440, and an fsGroup"
            if volume["secret"].get("optional") is not True:
                yield f"{volume['name']}: a Secret that is not there would keep the pod from starting"
    if any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "the Pod Security Standard `restricted` refuses what is the host's"
    kinds = {kind for v in spec.get("volumes", []) for kind in v if kind != "name"}
    yield from (f"`restricted` refuses a volume of the kind {kind}" for kind in sorted(kinds - _RESTRICTED_VOLUMES))
    volumes = [v["name"] for v in spec.get("volumes", [])]
    mounted = {m["name"] for c in pod.containers for m in c.get("volumeMounts", [])}
    yield from (f"the volume {n} is not mounted" for n in sorted(set(volumes) - mounted))
    yield from (f"there is no volume {n}" for n in sorted(mounted - set(volumes)))
    if len(set(volumes)) != len(volumes):
        yield "two volumes have one name"
    if any(is_sidecar(c) for c in pod.containers) and "kcoord/agent" not in pod.metadata.get("labels", {}):
        yield "without the label kcoord/agent it does not reach Redis"


def _of_container(pod: Pod, container: Object) -> Iterator[str]:
    if not _PINNED.fullmatch(container["image"]):
        yield f"the image {container['image']} is not pinned"
    resources = container.get("resources", {})
    if not {"cpu", "memory"} <= resources.get("requests", {}).keys() or "memory" not in resources.get("limits", {}):
        yield "its resources are not set"
    security = container.get("securityContext", {})
    wanted = {
        "allowPrivilegeEscalation": False,
        "runAsNonRoot": True,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if container["name"] in (*OURS, "redis"):
        wanted["readOnlyRootFilesystem"] = True
    yield from (f"securityContext.{n} must be {v}" for n, v in wanted.items() if security.get(n) != v)
    if "runAsUser" in security and any(is_sidecar(c) for c in pod.containers):
        yield "a user of its own cannot speak to the agent"
    yield from _of_environment(container)
    yield from _of_secrets(pod, container)
    commands = [container["command"]] if "command" in container else []
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        commands += [container[probe]["exec"]["command"]] if probe in container else []
    for command in commands:
        yield from _of_command(command)
    if is_sidecar(container):
        yield from _of_sidecar(container)
    paths = [m["mountPath"] for m in container.get("volumeMounts", [])]
    for name, entry in environment(container).items():
        path = entry.get("value", "")
        if name in ("KCOORD_STORE", "KCOORD_LOCAL_DIR", "KCOORD_SOCKET") and not _below(path, paths):
            yield f"{name} is in no volume"
        if name in ("KCOORD_LOCAL_DIR",) and path in paths:
            yield f"{name} is a volume's root, which belongs to root: it must be a directory in it"


def _below(path: str, roots: list[str]) -> bool:
    return any(path == root or path.startswith(f"{root}/") for root in roots)


def _of_environment(container: Object) -> Iterator[str]:
    for name, entry in environment(container).items():
        if name.startswith("KCOORD_") and name not in KNOWN:
            yield f"there is no setting {name}"
        if name in SECRETS:
            if container["name"] not in OURS:
                yield f"{name} is a secret of the agent's"
            if name not in FILES:
                yield f"{name} shows in the environment: it must be a file"
        if "secretKeyRef" in entry.get("valueFrom", {}) and entry["valueFrom"]["secretKeyRef"]["name"] == SECRET:
            yield f"{name} is a secret in the environment"
    for source in container.get("envFrom", []):
        if "secretRef" in source:
            yield "a whole Secret in its environment"


def _of_secrets(pod: Pod, container: Object) -> Iterator[str]:
    """They are files, which the agent's containers alone mount, and nobody may write to."""
    found = {v["name"] for v in pod.spec.get("volumes", []) if v.get("secret", {}).get("secretName") == SECRET}
    mounts = [m for m in container.get("volumeMounts", []) if m["name"] in found]
    for mount in mounts:
        if container["name"] not in OURS:
            yield f"{mount['name']} is the agent's alone"
        if mount.get("readOnly") is not True:
            yield f"{mount['name']} must be mounted readOnly"
        if "subPath" in mount:
            yield f"{mount['name']} is mounted by subPath: new keys never come in"
    for name, entry in environment(container).items():
        if name in FILES and not _below(entry.get("value", ""), [m["mountPath"] for m in mounts]):
            yield f"{name} is in no mounted Secret"


def _of_command(command: list[str]) -> Iterator[str]:
    """Parsed as the command would parse it, and not run."""
    if command[0] != "kcoord":
        return
    if len(command) < 2 or command[1] not in _COMMANDS:
        yield f"there is no command {' '.join(command[:2])}"
        return
    parser = importlib.import_module(f"kcoord.cli.{command[1]}").command
    try:
        parser.make_context("kcoord", list(command[2:]))
    except (click.ClickException, SystemExit) as error:
        yield f"{' '.join(command)}: {getattr(error, 'message', error)}"


def _of_sidecar(container: Object) -> Iterator[str]:
    if "readinessProbe" in container:
        yield "a readiness probe of the agent takes the pod's name out of DNS"
    startup = container.get("startupProbe", {})
    command = startup.get("exec", {}).get("command", [])
    if "--await" not in command:
        yield "its startup probe must succeed in the end, or the pod does not start"
    elif startup.get("timeoutSeconds", 1) < float(command[command.index("--await") + 1]) + 10:
        yield "its startup probe is given up before it ends"
    if "--check" not in container.get("livenessProbe", {}).get("exec", {}).get("command", []):
        yield "nothing finds out that it hangs"
