"""The manifests as `kubectl kustomize` renders them, and what is in them."""

from __future__ import annotations

import atexit
import copy
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
OVERLAYS = sorted(path.name for path in (ROOT / "k8s" / "overlays").iterdir())
WITH_SIDECAR = ["indexed-job", "jobset", "prewarm", "trainjob"]

Object = dict[str, Any]


@dataclass
class Pod:
    """A pod template, wherever it is: `of` is the object that makes pods of it."""

    of: Object
    metadata: Object
    spec: Object

    @property
    def name(self) -> str:
        return f"{self.of['kind']} {self.of['metadata']['name']}"

    @property
    def containers(self) -> list[Object]:
        return [*self.spec.get("initContainers", []), *self.spec["containers"]]

    def container(self, name: str) -> Object:
        return next(c for c in self.containers if c["name"] == name)


def is_sidecar(container: Object) -> bool:
    return container.get("restartPolicy") == "Always"


@functools.lru_cache(maxsize=1)
def checkout() -> Path:
    """A copy of k8s/ with secrets, which the repository has none of."""
    copied = Path(tempfile.mkdtemp(prefix="kcoord-k8s-")) / "k8s"
    atexit.register(shutil.rmtree, copied.parent, ignore_errors=True)
    shutil.copytree(ROOT / "k8s", copied, ignore=shutil.ignore_patterns("secrets"))
    subprocess.run([copied / "make-secrets.sh"], check=True, capture_output=True)
    return copied


@functools.lru_cache
def rendered(directory: Path) -> str:
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl: apt-get install kubectl, or https://kubernetes.io/docs/tasks/tools")
    done = subprocess.run(["kubectl", "kustomize", directory], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@functools.lru_cache
def _parsed(directory: Path) -> list[Object]:
    import yaml

    return list(yaml.safe_load_all(rendered(directory)))


def objects(directory: str | Path) -> list[Object]:
    """All objects of ``base`` or of an overlay; the caller may change them."""
    inside = checkout() / ("base" if directory == "base" else f"overlays/{directory}")
    return copy.deepcopy(_parsed(directory if isinstance(directory, Path) else inside))


def kustomized(directory: Path, resources: Sequence[str | Path], *components: str) -> list[Object]:
    """All objects of a kustomization that is written into `directory`: `resources` with our `components`."""
    listed = [os.path.relpath(directory / each, directory) for each in resources]
    ours = [os.path.relpath(checkout() / "components" / each, directory) for each in components]
    (directory / "kustomization.yaml").write_text(f"resources: {listed}\ncomponents: {ours}\n")
    return objects(directory)


def pods(found: list[Object]) -> Iterator[Pod]:
    for each in found:
        for metadata, spec in _templates(each):
            yield Pod(each, metadata, spec)


def _templates(each: Any) -> Iterator[tuple[Object, Object]]:
    if isinstance(each, dict):
        if isinstance(each.get("spec"), dict) and "containers" in each["spec"]:
            yield each.get("metadata", {}), each["spec"]
        else:
            for inner in each.values():
                yield from _templates(inner)
    elif isinstance(each, list):
        for inner in each:
            yield from _templates(inner)


def environment(container: Object) -> dict[str, Object]:
    return {e["name"]: e for e in container.get("env", [])}
