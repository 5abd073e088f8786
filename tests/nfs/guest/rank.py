"""A rank on a client host: it does what it is told, a line of JSON at a time, each in a thread of its own.

A request is ``{"id", "call", "with"}``, its answer ``{"id", "value" | "error", "began", "ended"}`` on the guest's monotonic
clock. The end of its input ends it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kcoord.artifacts import local
from kcoord.artifacts.describe import describe
from kcoord.artifacts.manifest import Manifest, Origin
from kcoord.artifacts.store import Store, manifest_digest
from kcoord.errors import ArtifactInvalid, KcoordError, StoreError
from kcoord.keys.cache_key import CacheKey
from kcoord.protocol.messages import Done, Stop
from kcoord.rank.client import AgentClient, Lead
from kcoord.retention.limits import Limits
from kcoord.retention.store_collector import collect
from kcoord.retention.tidying import Tidying
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from tests.support.mountstats import rpcs

SETTINGS = Settings.from_environ()
NOTICES = Notices()
CLIENT = AgentClient(SETTINGS, NOTICES)
_FILES = {"kernel.cubin": 700, "kernel.ttir": 3000, "kernel.json": 1}  # lines

leads: dict[str, Lead] = {}
_output = threading.Lock()


def key_of(name: str) -> CacheKey:
    return CacheKey.of("nfs", name)


def home_of(name: str, tier: str) -> Path:
    return SETTINGS.local_dir / tier / name


def written_by(writer: str) -> dict[str, bytes]:
    """An artifact whose every line names its writer: a mix of two shows."""
    return {name: f"{writer}:{name}\n".encode() * lines for name, lines in _FILES.items()}


def writer_of(contents: dict[str, bytes]) -> str:
    """The one writer of these files, or ``torn``."""
    writers = {content.partition(b":")[0].decode(errors="replace") for content in contents.values()}
    writer = writers.pop()
    return writer if contents == written_by(writer) and not writers else "torn"


def _stage(directory: Path, writer: str) -> Path:
    for name, content in written_by(writer).items():
        (directory / name).write_bytes(content)
    return directory


# What the outside may call.


def claim(name: str, tier: str = "homes") -> dict[str, str]:
    answer = CLIENT.claim(key_of(name), home_of(name, tier))
    if isinstance(answer, Lead):
        leads[name] = answer
    facts = {k: v for k, v in vars(answer).items() if isinstance(v, str)} if hasattr(answer, "__dict__") else {}
    return {"answer": type(answer).__name__, **facts}


def give_up(name: str) -> None:
    CLIENT.give_up(leads.pop(name), key_of(name))


def publish(name: str, writer: str, tier: str = "homes") -> bool:
    home = home_of(name, tier)
    staging = _stage(local.new_staging(home), writer)
    return CLIENT.publish(leads.pop(name, None), key_of(name), staging, home, 0.5, "no device")


def publish_at(moment: float, name: str, writer: str) -> bool:
    """`publish` at this moment of the guest's monotonic clock, to race with another host."""
    home = home_of(name, "homes")
    staging = _stage(local.new_staging(home), writer)
    while time.monotonic() < moment:
        pass
    return CLIENT.publish(leads.pop(name, None), key_of(name), staging, home, 0.5, "no device")


def read(name: str, tier: str = "homes") -> str:
    """Who wrote the local copy, every byte of which is checked."""
    artifact = local.open_artifact(home_of(name, tier), key_of(name).digest)
    return "missing" if artifact is None else writer_of(local.read_contents(artifact))


def forget(name: str, tier: str = "homes") -> None:
    shutil.rmtree(home_of(name, tier))


def status() -> dict[str, Any]:
    """The agent's; it is started if there is none."""
    return CLIENT.status() or {}


def stop_agent() -> bool:
    return CLIENT.ask(Stop(), Done, start=False) is not None


def now() -> float:
    return time.monotonic()


def store_publish(name: str, writer: str) -> str:
    """Past the agent: what a second, uncoordinated writer does."""
    store = _store()
    staging = _stage(local.new_staging(home_of(name, "past-the-agent")), writer)
    manifest: Manifest = describe(staging, key_of(name), 0.5, Origin.here(os.getpid(), None, "no device")).manifest
    contents = {file.name: (staging / file.name).read_bytes() for file in manifest.files}
    shutil.rmtree(staging)
    return store.publish(manifest, contents)


def store_fetch(name: str, announced: str | None = None) -> dict[str, str]:
    return _fetch(_store(), name, announced)


def store_read(names: list[str], seconds: float, announced: bool = False) -> dict[str, int]:
    """Read artifacts from the store, one after the other, for so long; how often each thing was met.

    `announced`: as a waiter reads, who never judges; else as the key's leader does.
    """
    store, met, end = _store(), Counter[str](), time.monotonic() + seconds
    while time.monotonic() < end:
        for name in names:
            # no artifact has this manifest; what was there is told all the same
            found = _read_as_waiter(store, name) if announced else _fetch(store, name, None)
            met[found["found"]] += 1
    return dict(met)


def store_remove(name: str) -> bool:
    """As a clean-up does it: out of the way by a rename, then unlinked, without mercy for who reads."""
    path = _store().home(key_of(name).digest)
    trash = path.parent.parent.parent / "staging" / f"trash-{os.getpid()}-{time.monotonic_ns()}"
    try:
        path.rename(trash)
    except FileNotFoundError:
        return False
    trash.unlink()
    return True


def store_unlink(name: str) -> bool:
    """As a user does it: ``rm`` in place."""
    _store().home(key_of(name).digest).unlink(missing_ok=True)
    return True


def store_publish_all(names: list[str], seconds: float) -> int:
    """Publish these again and again, for so long; how often."""
    end, published = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        for name in names:
            store_publish(name, f"A{published % 10}")
            published += 1
    return published


def collect_all(seconds: float, grace: float) -> dict[str, Any]:
    """Passes of garbage collection that spare nothing, one after the other, for so long."""
    end, removed, passes, errors = time.monotonic() + seconds, 0, 0, []
    while time.monotonic() < end:
        try:
            found = collect(_root(), Limits(max_size=0, least_age=0.0), tidying=Tidying(grace=grace))
            removed += len(found.removed)
        except KcoordError as error:
            errors.append(str(error))
        passes += 1
    return {"passes": passes, "removed": removed, "errors": errors}


def collect_once(**limits: Any) -> dict[str, Any]:
    began = time.monotonic()
    found = collect(_root(), Limits(**limits))
    return {"seconds": time.monotonic() - began, "artifacts": found.artifacts, "tidied": found.tidied}


def fill(count: int) -> None:
    """Put so many into the store that look like artifacts, past everything; on the server's host."""
    for n in range(count):
        path = _store().home(key_of(f"filling-{n}").digest)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(3000))


def _root() -> Path:
    assert SETTINGS.store is not None
    return SETTINGS.store


def _store() -> Store:
    assert SETTINGS.store is not None
    return Store(SETTINGS.store)


def _fetch(store: Store, name: str, announced: str | None) -> dict[str, str]:
    try:
        fetched = store.fetch(key_of(name).digest, announced)
    except ArtifactInvalid as error:
        return {"found": "invalid", "why": str(error)}
    except KcoordError as error:
        return {"found": f"error: {error}"}
    if fetched is None:
        return {"found": "missing"}
    return {"found": writer_of(fetched[1]), "manifest": fetched[2]}


def _read_as_waiter(store: Store, name: str) -> dict[str, str]:
    """What was announced is whatever the manifest says at this moment."""
    try:
        encoded = store.manifest_bytes(key_of(name).digest)
    except (ArtifactInvalid, StoreError):
        encoded = None
    announced = "0" * 64 if encoded is None else manifest_digest(encoded)
    return _fetch(store, name, announced)


CALLS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        claim, give_up, publish, publish_at, read, forget, status, stop_agent, now,
        store_publish, store_fetch, store_read, store_remove, store_unlink, rpcs,
        store_publish_all, collect_all, collect_once, fill,
    )
}  # fmt: skip


def _answer(request: dict[str, Any]) -> None:
    reply: dict[str, Any] = {"id": request["id"], "began": time.monotonic()}
    try:
        reply["value"] = CALLS[request["call"]](**request["with"])
    except Exception as error:  # noqa: BLE001 - it is raised where the answer is asked for
        reply["error"] = f"{type(error).__name__}: {error}"
    reply["ended"] = time.monotonic()
    with _output:
        os.write(1, json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    for line in sys.stdin:
        threading.Thread(target=_answer, args=(json.loads(line),), daemon=True).start()
    os._exit(0)  # a thread that hangs in a dead NFS server must not hold it up
