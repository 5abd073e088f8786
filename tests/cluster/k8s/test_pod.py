"""The pod of the Indexed Job, run as processes with what its manifest says: agent, probes, and a job of two ranks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kcoord.artifacts.store import Store
from kcoord.packs.pack_files import packs_of
from tests.cluster.k8s.manifests import checkout, kustomized, objects, pods
from tests.cluster.k8s.promises import SECRETS
from tests.cluster.k8s.running import USER, RunningPod
from tests.support.command import DOCTOR
from tests.support.packs import listed_in
from tests.support.redis_server import RedisServer
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish
from tests.support.waiting import pause

RANK = PROGRAMS / "generic_rank.py"
KERNELS = 12


@pytest.fixture
def pod(sandbox: Sandbox, server: RedisServer, secrets: dict[str, str]) -> Iterator[RunningPod]:
    changed = {
        "--nnodes=2": ["--nnodes=1"],
        "--nproc-per-node=8": ["--nproc-per-node=2"],
        "--rdzv-endpoint=train-0.train:29500": ["--rdzv-endpoint=localhost:0"],
        "train.py": [str(RANK), str(KERNELS), "0.3"],
    }
    (template,) = pods([each for each in objects("indexed-job") if each["kind"] == "Job"])
    running = RunningPod(template, sandbox.root, server, secrets, changed)
    yield running
    running.end()


def started(pod: RunningPod, *before: str, **more: str) -> subprocess.Popen[str]:
    """The sidecar, once its startup probe lets the others start."""
    agent = pod.start("kcoord-agent", *before, **more)
    assert pod.probe("kcoord-agent", "startupProbe") == 0
    if not pod.socket.exists():
        agent.kill()
        pytest.fail(f"the agent does not listen: {finish(agent).stderr}")
    return agent


def ended(agent: subprocess.Popen[str], number: int = signal.SIGTERM) -> str:
    """What it said, after SIGTERM, which it must obey."""
    agent.send_signal(number)
    done = finish(agent, 60)
    assert done.returncode == (0 if number == signal.SIGTERM else -number), done.stderr
    return done.stderr


def status(pod: RunningPod) -> dict[str, Any]:
    done = finish(pod.start("kcoord-agent", command=["kcoord", "status", "--json"]))
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rank(pod: RunningPod, n: int, kernels: int, seconds: float = 0, *before: str, **more: str) -> subprocess.Popen[str]:
    """A process of the trainer's container."""
    command = ["python", str(RANK), str(kernels), str(seconds)]
    return pod.start("trainer", *before, command=command, RANK=str(n), LOCAL_RANK=str(n), **more)


def reports(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


def test_the_probes_and_a_job_of_two_ranks(pod: RunningPod) -> None:
    pytest.importorskip("torch")
    agent = started(pod)
    assert pod.probe("kcoord-agent", "livenessProbe") == 0
    trainer = pod.start("trainer")
    store = pod.path("/kcoord-store")
    eventually(lambda: len(list(store.glob("v2/objects/??/*"))) >= 3, 60, "kernels are published")
    assert status(pod)["coordinates"] == "Redis"
    done = finish(trainer)
    assert done.returncode == 0, done.stderr
    found = reports(done.stdout)
    assert len(found) == 2
    assert sum(len(report["compiled"]) for report in found) == KERNELS
    assert "kcoord report train" in done.stderr, "the summary names the job as the controller does"
    ended(agent)
    assert not pod.socket.exists()
    assert len(listed_in(Store(store), packs_of(store, "train")[0])) == KERNELS


def test_on_a_disk_of_the_node_copies_outlive_the_pod_and_pods_share_them(
    tmp_path: Path, sandbox: Sandbox, server: RedisServer, secrets: dict[str, str]
) -> None:
    found = kustomized(tmp_path, [checkout() / "overlays" / "indexed-job"], "local-disk")
    (template,) = pods([each for each in found if each["kind"] == "Job"])
    pod = RunningPod(template, sandbox.root, server, secrets, {})
    disk = pod.path("/kcoord-local")
    disk.chmod(0o700)  # as k8s/local-disk says
    if pod.is_another_user:
        os.chown(disk, USER, USER)
    try:
        agent = started(pod)
        assert finish(rank(pod, 0, 5)).returncode == 0
        beside = {"KCOORD_SOCKET": str(pod.path("/kcoord/beside/agent.sock"))}  # of another pod on this node
        other = pod.start("kcoord-agent", **beside)
        eventually(Path(beside["KCOORD_SOCKET"]).exists, what="another pod's agent listens")
        (report,) = reports(finish(rank(pod, 0, 5, **beside)).stdout)
        assert report["compiled"] == []
        ended(other)
        ended(agent)
        for emptied in (pod.node, pod.path("/kcoord-store/v2/objects")):
            shutil.rmtree(emptied)
        agent = started(pod)  # of the next pod, with a volume of its own for the socket
        (report,) = reports(finish(rank(pod, 0, 5)).stdout)
        assert (report["counters"]["local_hits"], report["compiled"]) == (5, [])
        ended(agent)
    finally:
        pod.end()


def test_no_secret_reaches_a_rank_and_no_rank_reaches_a_secret(pod: RunningPod, secrets: dict[str, str]) -> None:
    agent = started(pod)
    begun = pod.path("/kcoord/begun")
    waits = rank(pod, 0, 1, 600, BEGUN=str(begun))
    eventually(begun.exists, what="the rank compiles")
    theirs = psutil.Process(waits.pid).environ()
    assert not SECRETS & theirs.keys()
    password = secrets["redis-url"].partition("kcoord:")[2].partition("@")[0]
    assert password not in str(theirs)
    assert password not in str(psutil.Process(agent.pid).environ())
    assert status(pod)["coordinates"] == "Redis", "and the agent has it"
    assert not [p for p in pod.path("/kcoord").rglob("*") if p.is_file() and password.encode() in p.read_bytes()]
    if pod.is_another_user:  # root reads everything
        look = pod.start("trainer", command=["python", "-c", f"open('/proc/{agent.pid}/environ').read()"])
        assert "PermissionError" in finish(look).stderr
    waits.kill()
    finish(waits)
    ended(agent)


@pytest.fixture(params=["indexed-job"])
def without_secrets(sandbox: Sandbox, server: RedisServer, request: pytest.FixtureRequest) -> Iterator[RunningPod]:
    """A pod in a namespace whose Secret is not there, as it may be: what is mounted is empty."""
    (template,) = pods([each for each in objects(request.param) if each["kind"] == "Job"])
    running = RunningPod(template, sandbox.root, server, {}, {})
    yield running
    running.end()


def test_without_its_secret_the_agent_serves_and_says_what_it_lacks(without_secrets: RunningPod) -> None:
    pod = without_secrets
    agent = started(pod)
    assert finish(rank(pod, 0, 1)).returncode == 0
    found = status(pod)
    assert found["coordinates"] == "lease files"
    said = ended(agent)
    for key in ("KCOORD_REDIS_URL_FILE", "KCOORD_SIGNING_KEY_FILE"):
        assert len([line for line in said.splitlines() if key in line and "has no such key" in line]) == 1
    assert Store(pod.path("/kcoord-store")).manifests(), "nothing is signed, as without a key anywhere"


@pytest.mark.parametrize("without_secrets", ["signed"], indirect=True)
def test_without_its_secret_an_agent_that_must_verify_does_not_serve(without_secrets: RunningPod) -> None:
    """Nor does it take to a store that nobody vouches for; and the pod starts, and its ranks compile."""
    pod = without_secrets
    agent = pod.start("kcoord-agent")
    waits = pod.start("kcoord-agent", command=["kcoord", "agent", "--await", "1"])
    assert finish(waits).returncode == 0
    trainer = finish(rank(pod, 0, 2))
    assert (trainer.returncode, reports(trainer.stdout)[0]["compiled"]) == (0, [0, 1])
    assert not pod.socket.exists()
    assert "KCOORD_TRUST=require needs a signing key" in ended(agent)


def test_what_the_agent_publishes_is_signed_with_the_secrets_key(pod: RunningPod, secrets: dict[str, str]) -> None:
    agent = started(pod)
    assert finish(rank(pod, 0, 1)).returncode == 0
    doctor = finish(pod.start("kcoord-agent", command=["python", *DOCTOR, "--json"]))
    found = {each["what"]: each for each in json.loads(doctor.stdout)["findings"]}
    key_id = secrets["signing-key"].split()[0]
    assert found["trust"]["finding"] == f"require: the key {key_id} signs"
    assert found["Redis"]["state"] == "ok", found["Redis"]
    verified = finish(pod.start("kcoord-agent", command=["kcoord", "verify"]))
    assert verified.returncode == 0, verified.stdout
    ended(agent)


def test_the_nightly_job_has_the_key_and_not_the_password(pod: RunningPod, secrets: dict[str, str]) -> None:
    agent = started(pod)
    assert finish(rank(pod, 0, 1)).returncode == 0
    ended(agent)
    shutil.rmtree(pod.path("/kcoord-secrets"))
    (template,) = pods(objects("gc"))
    nightly = RunningPod(template, pod.path("/"), pod.server, secrets, {})
    assert {path.name for path in pod.path("/kcoord-secrets").iterdir() if path.name[0] != "."} == {"signing-key"}
    done = finish(nightly.start("gc"))
    assert done.returncode == 0, done.stderr
    assert "not merged" not in done.stderr
    assert len(Store(pod.path("/kcoord-store")).manifests()) == 1, "it was used a moment ago"


_LASTS = "import time, kcoord.cli as c; c.cli = lambda **k: (print('begun', flush=True), time.sleep(600)); c.main()"


def test_a_command_that_is_a_containers_first_process_ends_when_it_is_told_to() -> None:
    """Such a process hears no signal that it does not handle: a drained node would wait for `kcoord gc` to be killed."""
    apart = ("unshare", "--pid", "--fork", "--kill-child")
    if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make pid namespaces")
    with subprocess.Popen([*apart, sys.executable, "-c", _LASTS], stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        try:
            assert started.stdout.readline() == "begun\n"
            (first,) = psutil.Process(started.pid).children()
            first.terminate()
            assert started.wait(60) == 143
        finally:
            started.kill()


def test_a_socket_that_a_killed_agent_left_is_replaced(pod: RunningPod) -> None:
    ended(started(pod), signal.SIGKILL)
    assert pod.socket.exists()
    assert pod.probe("kcoord-agent", "livenessProbe") == 1
    agent = started(pod)
    assert pod.probe("kcoord-agent", "livenessProbe") == 0
    ended(agent)


def test_an_agent_that_hangs_fails_its_liveness_probe(pod: RunningPod) -> None:
    agent = started(pod)
    pause(agent)
    assert pod.probe("kcoord-agent", "livenessProbe") == 1
    agent.send_signal(signal.SIGCONT)
    ended(agent)


BAD = [
    ("KCOORD_LEASE_TTL", "soon", "KCOORD_LEASE_TTL"),
    ("KCOORD_LOCAL_DIR", "/proc/nowhere", "KCOORD_LOCAL_DIR"),
    ("KCOORD_SOCKET", "/proc/nowhere/agent.sock", "cannot listen"),
]


@pytest.mark.parametrize(("name", "value", "said"), BAD, ids=[name for name, _, _ in BAD])
def test_an_agent_that_cannot_work_does_not_keep_the_pod_from_starting(
    pod: RunningPod, name: str, value: str, said: str
) -> None:
    agent = pod.start("kcoord-agent", **{name: value})
    waits = pod.start("kcoord-agent", command=["kcoord", "agent", "--await", "1"], **{name: value})
    assert finish(waits).returncode == 0, "the startup probe lets the others start"
    trainer = finish(rank(pod, 0, 2))
    assert trainer.returncode == 0, trainer.stderr
    assert reports(trainer.stdout)[0]["compiled"] == [0, 1]
    assert agent.poll() is None, "it would be restarted over and over"
    assert said in ended(agent)


def test_a_launcher_beside_a_sidecar_starts_no_agent(pod: RunningPod) -> None:
    """Also when there is none at the moment: the socket's name is the sidecar's."""
    launch = ["kcoord", "exec", "--", pod.python, str(RANK), "1"]
    done = finish(pod.start("trainer", command=launch, KCOORD_AGENT_TIMEOUT="1"))
    assert done.returncode == 0, done.stderr
    assert "none is started" in done.stderr
    assert not pod.socket.exists()
    agent = started(pod)
    done = finish(pod.start("trainer", command=launch))
    assert done.returncode == 0, done.stderr
    assert "1 kernel: 0 compiled, 1 loaded" in done.stderr
    assert agent.poll() is None
    ended(agent)
