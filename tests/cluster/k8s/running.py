"""A pod's containers as processes: the manifests' commands, arguments, environment and file modes, below a directory.

What differs from a pod: paths are prefixed with the directory, volumes are directories that are made as the kubelet makes them,
the Redis Service's address is the test's server, unless its name resolves, and there are no images: ``kcoord`` and
``kcoord-torchrun`` are this checkout's.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import psutil

from tests.cluster.k8s.manifests import ROOT, Object, Pod, objects
from tests.support.living import kill
from tests.support.redis_server import RedisServer

_PROGRAMS = {
    "kcoord": ["-c", "from kcoord.cli import main; main()"],
    "kcoord-torchrun": ["-m", "kcoord_launch.torchrun"],
    "python": [],
}
USER = 65532
_SET_BY_THE_CONTROLLER = {"batch.kubernetes.io/job-name": "train"}


@functools.lru_cache(maxsize=1)
def _as_user() -> tuple[tuple[str, ...], str]:
    """What makes a command run as the pod's user without a privilege, and a Python that this user may run.

    Nothing, and our own, if we may not become another user, or that one may not read this checkout.
    """
    prefix = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all",
              "--no-new-privs")  # fmt: skip
    same = shutil.which(f"python{sys.version_info[0]}.{sys.version_info[1]}", path="/usr/local/bin:/usr/bin")
    code = "import subprocess, sys, kcoord.cli, redis.asyncio; subprocess.run([sys.executable, '-c', ''], check=True)"
    if os.getuid() == 0 and shutil.which("setpriv") is not None:
        for python in filter(None, (sys.executable, same)):
            tried = subprocess.run([*prefix, python, "-c", code], capture_output=True, env=_environment(), cwd="/")
            if tried.returncode == 0:
                return prefix, python
    return (), sys.executable


def _environment() -> dict[str, str]:
    """What a container's image has: PATH, and what is installed."""
    installed = [str(ROOT), str(ROOT / "launch"), sysconfig.get_paths()["purelib"]]
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(installed)}


class RunningPod:
    """`changed` words of commands are replaced by others: hosts, numbers of nodes and ranks, and the training script. `secrets`:
    what the base's Secrets hold, by key; of a Secret that is not there, nothing."""

    def __init__(
        self, pod: Pod, root: Path, server: RedisServer, secrets: dict[str, str], changed: dict[str, list[str]],
        *, resolves: bool = False,
    ) -> None:  # fmt: skip
        self._resolves = resolves
        self._pod, self._root, self.server, self._secrets = pod, root, server, secrets
        self._changed = changed
        self._prefix, self.python = _as_user()
        self._started: list[subprocess.Popen[str]] = []
        user = USER if self._prefix else os.getuid()
        root.chmod(0o755)
        self._project_secrets()
        for volume in pod.spec["volumes"]:
            for container in pod.containers if "secret" not in volume else []:
                for mount in container.get("volumeMounts", []):
                    if mount["name"] == volume["name"] and mount["mountPath"].startswith("/kcoord"):
                        path = self.path(mount["mountPath"])
                        path.mkdir(exist_ok=True)
                        path.chmod(0o1777)  # an emptyDir: root's, and, being a mount, for this pod alone
                        if "persistentVolumeClaim" in volume:
                            path.chmod(0o770)
                            os.chown(path, 0 if self._prefix else -1, user if self._prefix else -1)  # fsGroup

    def _project_secrets(self) -> None:
        """The volumes of Secrets: root's, with the pod's fsGroup. Files are links to ``..data``, a link that is renamed."""
        mounts = [mount for container in self._pod.containers for mount in container["volumeMounts"]]
        for volume in self._pod.spec["volumes"]:
            (place,) = {mount["mountPath"] for mount in mounts if mount["name"] == volume["name"]}
            if "secret" not in volume or not place.startswith("/kcoord"):
                continue
            directory = self.path(place)
            directory.mkdir(exist_ok=True)
            group = self._pod.spec["securityContext"]["fsGroup"]
            made = tempfile.mkdtemp(prefix="..2026_", dir=directory)
            for key in self._keys(volume["secret"]):
                path = Path(made, key)
                path.write_text(self._here(self._secrets[key]))
                path.chmod(volume["secret"]["defaultMode"] if self._prefix else 0o400)  # else it is no other user's
                if self._prefix:
                    os.chown(path, 0, group)
                (directory / key).unlink(missing_ok=True)
                (directory / key).symlink_to(f"..data/{key}")
            Path(made).chmod(0o755)
            (directory / "..data_tmp").symlink_to(Path(made).name)
            (directory / "..data_tmp").rename(directory / "..data")

    def _keys(self, secret: Object) -> list[str]:
        there = next(each["data"] for each in objects("base") if each["metadata"]["name"] == secret["secretName"])
        wanted = [item["key"] for item in secret.get("items", [])] or list(there)
        return [key for key in wanted if key in self._secrets]

    @property
    def is_another_user(self) -> bool:
        return bool(self._prefix)

    @property
    def node(self) -> Path:
        return self.path("/kcoord/node")

    @property
    def socket(self) -> Path:
        return self.node / "agent.sock"

    def path(self, inside: str) -> Path:
        return self._root / inside.lstrip("/")

    def container(self, name: str) -> Object:
        return self._pod.container(name)

    def start(self, name: str, *before: str, command: list[str] | None = None, **more: str) -> subprocess.Popen[str]:
        """The container's process; with `before`, led in by that; with `command`, another one, as ``kubectl exec`` starts it."""
        container = self._pod.container(name)
        process = subprocess.Popen(
            [*before, *self._prefix, *self._command(command or container["command"])],
            env={**self.environment(container), **more},
            cwd=self._root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(process)
        return process

    def end(self) -> None:
        """Kill what a test that failed left running."""
        for process in self._started:
            with contextlib.suppress(psutil.NoSuchProcess):
                kill(psutil.Process(process.pid).children(recursive=True))
            process.kill()
            if process.stdout is not None and not process.stdout.closed:
                process.communicate(timeout=30)

    def probe(self, name: str, which: str) -> int:
        """The exit code of a probe's command, run in the container's environment, as the kubelet does."""
        probe = self._pod.container(name)[which]
        process = self.start(name, command=probe["exec"]["command"])
        process.communicate(timeout=probe["timeoutSeconds"] + 30)
        return process.returncode

    def environment(self, container: Object) -> dict[str, str]:
        found = _environment()
        configured = {each["metadata"]["name"]: each["data"] for each in objects("base") if each["kind"] == "ConfigMap"}
        for source in container.get("envFrom", []):
            found |= configured[source["configMapRef"]["name"]]
        labels = {**self._pod.metadata.get("labels", {}), **_SET_BY_THE_CONTROLLER}
        for entry in container.get("env", []):
            if "value" in entry:
                value = entry["value"]
            else:
                value = labels.get(entry["valueFrom"]["fieldRef"]["fieldPath"].partition("'")[2].rpartition("'")[0], "")
            found[entry["name"]] = self._here(value)
        return found

    def _here(self, value: str) -> str:
        if value.startswith("/kcoord"):
            return str(self.path(value))
        return value if self._resolves else value.replace("redis-kcoord:6379", f"127.0.0.1:{self.server.port}")

    def _command(self, words: list[str]) -> list[str]:
        program, *arguments = words
        changed = [there for word in arguments for there in self._changed.get(word, [word])]
        return [self.python, *_PROGRAMS[program], *changed]
