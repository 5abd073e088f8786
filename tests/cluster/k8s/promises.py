"""Promises of `docs/kubernetes.md` that every pod of the manifests keeps, and that no schema knows."""

from __future__ import annotations

from kcoord import settings
from kcoord.agent.server import ENDS_WITHIN
from kcoord.settings import FIELDS, variable
from tests.cluster.k8s.manifests import Object, Pod, environment, is_sidecar, pods

KNOWN = {variable(field.name) for field in FIELDS}
SECRETS = set(map(variable, settings.SECRETS))
FILES = set(map(variable, settings.SECRET_FILES))
_OURS = ("kcoord-agent", "gc")  # the containers of the agent's image
_SECRET = "kcoord-agent"
_GRACE = 30 + ENDS_WITHIN  # seconds: Kubernetes' own for the trainer, and after it the agent's
_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "runAsNonRoot": True,
    "capabilities": {"drop": ["ALL"]},
    "seccompProfile": {"type": "RuntimeDefault"},
}
_VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}


def check(found: list[Object]) -> None:
    """Fails for a pod of these objects that breaks a promise."""
    for pod in pods(found):
        _needs_no_rights(pod)
        _keeps_its_secrets(pod)
        _states_its_needs(pod)
        if any(map(is_sidecar, pod.containers)):
            _lives_with_its_agent(pod)


def _needs_no_rights(pod: Pod) -> None:
    """It asks the API server for nothing, and keeps to the Pod Security Standard ``restricted``."""
    spec = pod.spec
    assert spec.get("automountServiceAccountToken") is False, pod.name
    assert not any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")), pod.name
    assert {kind for volume in spec.get("volumes", []) for kind in volume if kind != "name"} <= _VOLUMES, pod.name
    for container in pod.containers:
        security = container.get("securityContext", {})
        assert {name: security.get(name) for name in _RESTRICTED} == _RESTRICTED, (pod.name, container["name"])


def _states_its_needs(pod: Pod) -> None:
    """A namespace with a ResourceQuota refuses a pod of which one container states no need, or no limit.

    No container limits ephemeral storage: the kubelet evicts a pod that uses more than the sum, volumes included.
    """
    for container in pod.containers:
        where, resources = (pod.name, container["name"]), container.get("resources", {})
        for kind in ("requests", "limits"):
            assert {"cpu", "memory"} <= resources.get(kind, {}).keys(), where
        assert "ephemeral-storage" not in resources["limits"], where


def quality(pod: Pod) -> str:
    """The class of Kubernetes' quality of service: CPU and memory of all containers, init containers included, count."""
    needs = [container.get("resources", {}) for container in pod.containers]
    if not any(need.get(kind) for need in needs for kind in ("requests", "limits")):
        return "BestEffort"
    for limits, requests in ((need.get("limits", {}), need.get("requests", {})) for need in needs):
        if any(name not in limits or requests.get(name, limits[name]) != limits[name] for name in ("cpu", "memory")):
            return "Burstable"
    return "Guaranteed"


def _keeps_its_secrets(pod: Pod) -> None:
    """They are files that only the agent's containers mount, read-only, and a missing Secret keeps no pod from starting."""
    volumes = {v["name"]: v["secret"] for v in pod.spec.get("volumes", []) if "secret" in v}
    ours = {name: secret for name, secret in volumes.items() if secret["secretName"] == _SECRET}
    for secret in ours.values():
        assert (secret["defaultMode"], secret["optional"]) == (0o440, True), pod.name
    if ours:  # the agent refuses a file that others may read
        assert "fsGroup" in pod.spec["securityContext"], pod.name
    for container in pod.containers:
        where, variables = (pod.name, container["name"]), environment(container)
        mounts = [mount for mount in container.get("volumeMounts", []) if mount["name"] in ours]
        assert container["name"] in _OURS or not mounts, where
        assert all(mount.get("readOnly") is True and "subPath" not in mount for mount in mounts), where
        assert {name for name in variables if name.startswith("KCOORD_")} <= KNOWN, where
        assert not SECRETS - FILES & variables.keys(), where
        assert not any("secretRef" in source for source in container.get("envFrom", [])), where
        assert not any("secretKeyRef" in entry.get("valueFrom", {}) for entry in variables.values()), where
        for name in FILES & variables.keys():
            assert any(variables[name]["value"].startswith(f"{mount['mountPath']}/") for mount in mounts), where


def _lives_with_its_agent(pod: Pod) -> None:
    """An agent that does not work keeps no pod from starting, and one that works has time to end."""
    assert "kcoord/agent" in pod.metadata["labels"], f"{pod.name} does not reach Redis"
    assert pod.spec.get("terminationGracePeriodSeconds", 30) >= _GRACE, pod.name
    agent = pod.container("kcoord-agent")
    command = agent["startupProbe"]["exec"]["command"]
    assert agent["startupProbe"]["timeoutSeconds"] >= float(command[command.index("--await") + 1]) + 10, pod.name
    assert "--check" in agent["livenessProbe"]["exec"]["command"], pod.name
    assert "readinessProbe" not in agent, f"{pod.name} would not be in DNS until its agent is ready"
    assert not any("runAsUser" in container["securityContext"] for container in pod.containers), "one user for all"
