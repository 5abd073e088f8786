"""Packs: a node that starts warm reads one file and looks nothing up, and a fault of that file costs look-ups alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from kcoord.artifacts import local
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import MARKER
from kcoord.packs.pack import look_at_pack
from kcoord.packs.pack_files import packs_directory, packs_of
from kcoord.packs.recipe_files import save_part
from kcoord.rank.client import AgentClient, Answer, Lead, Ready
from tests.support.agents import Node, end_agent, key_of, recipe_of, stage, until
from tests.support.artifacts import publish
from tests.support.cluster import start_agent
from tests.support.command import KCOORD
from tests.support.interpose import CALLS, Interposer
from tests.support.packs import pack, packed_in
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish
from tests.support.signing import opened

NAMES = [f"k{n}" for n in range(12)]
HANGS = 3600.0
NO_SWEEP = "import kcoord.agent.chores.sweeping as sweeping\nsweeping.FIRST_IN_STORE = 1e9\n"
"""For an agent: it does not look after the store's staging at a random moment of its first minute."""


def job(store: Path, **flags: str) -> Node:
    """A node of the job: nothing is on its disk."""
    return Node(store=str(store), profile="job", **flags)


def filled(root: Path, *keys: str, names: Iterable[str] = NAMES, packed: bool = True) -> Store:
    """A store with the artifacts of an earlier job, and perhaps their pack."""
    store = opened(root, *keys)
    digests = [publish(store, name) for name in names]
    if packed:
        assert pack(store, digests) == set(digests)
    return store


def lose_objects(store: Store) -> None:
    shutil.rmtree(store.root / "v2" / "objects")
    (store.root / "v2" / "objects").mkdir()


def home_of(node: Node, name: str) -> Path:
    return node.directory / local.place_of(key_of(name).digest)


def claim(node: Node, client: AgentClient, name: str) -> Answer:
    return client.claim(key_of(name), home_of(node, name))


def assert_loads(node: Node, names: Iterable[str], source: str) -> None:
    """Every artifact is the right one, and came from `source`."""
    client = node.client()
    for name in names:
        assert claim(node, client, name) == Ready(source), name
        found = local.open_artifact(home_of(node, name), key_of(name).digest)
        assert found is not None
        assert (found.path / "k").read_bytes() == name.encode()


def log_of(node: Node) -> str:
    return (node.directory / "started.log").read_text()


# --- from job to job ---


@pytest.mark.smoke
def test_the_second_node_loads_the_right_kernels_without_a_look_at_the_stores_artifacts(tmp_path: Path) -> None:
    store = filled(tmp_path / "store", packed=False)
    with job(store.root) as first:
        agent = first.start()
        assert_loads(first, NAMES, "store")
        end_agent(agent.pid)
    (path,) = packs_of(store.root, "job")
    assert packed_in(store, path) == {key_of(name).digest for name in NAMES}
    lose_objects(store)
    with job(store.root) as second:
        second.start()
        assert_loads(second, NAMES, "pack")
        assert second.status()["packs"] == {"job": {"artifacts": len(NAMES), "file": path.name}}
        done = subprocess.run([sys.executable, *KCOORD, "status"], env=second.environ(), capture_output=True, text=True)
        assert "pack of job: 12 artifacts" in done.stdout.splitlines(), done.stderr
        assert log_of(second) == ""


def test_a_cold_jobs_own_compiles_are_packed_and_its_ranks_count_what_came_from_there(sandbox: Sandbox) -> None:
    settings = {"KCOORD_STORE": str(sandbox.root / "store"), "KCOORD_STORE_CREATE": "1", "KCOORD_PROFILE": "job"}

    def status(here: dict[str, str]) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(sandbox.run_kcoord(*KCOORD, "status", "--json", **here).stdout)
        return found

    def counters(node: str, packs: int) -> dict[str, float]:
        here = {**settings, "KCOORD_LOCAL_DIR": str(sandbox.root / node)}
        agent = sandbox.start(*KCOORD, "agent", **here)
        eventually(lambda: list((sandbox.root / node).glob("*.sock")))
        eventually(lambda: len(status(here)["packs"]) == packs)
        done = finish(sandbox.fork_kcoord(PROGRAMS / "generic_rank.py", "10", "0", **here))
        assert done.returncode == 0, done.stderr
        stats = sandbox.run_kcoord(*KCOORD, "stats", "--json", **here)
        agent.terminate()
        assert finish(agent).returncode == 0
        found: dict[str, float] = json.loads(done.stdout)["counters"]
        assert json.loads(stats.stdout)["pack_hits"] == found["pack_hits"]
        return found

    cold, warm = counters("one", packs=0), counters("two", packs=1)
    assert (cold["compiles"], cold["pack_hits"]) == (10, 0)
    assert (warm["compiles"], warm["store_hits"], warm["pack_hits"]) == (0, 10, 10)


def test_the_pack_holds_what_was_on_its_way_into_the_store_as_the_job_ended(
    tmp_path: Path, interposer: Interposer
) -> None:
    store = opened(tmp_path / "store")
    interposer.stall("fsync", below=store.root / "v2" / "staging", seconds=0.3)
    with job(store.root) as node:
        agent = start_agent(node, environ=interposer.environ)
        client = node.client()
        for name in NAMES:
            assert node.publish(client, node.lead(client, name), name)
        assert node.status()["uploads"]
        end_agent(agent.pid)
    (path,) = packs_of(store.root, "job")
    assert packed_in(store, path) == {key_of(name).digest for name in NAMES}


def test_a_job_that_tells_its_agent_the_profile_later_uses_the_pack_too(tmp_path: Path) -> None:
    """The agent of a pod, or of several jobs."""
    store = filled(tmp_path / "store")
    with Node(store=str(store.root)) as node:
        node.start()
        assert_loads(node, NAMES[:1], "store")
        with node.wire() as wire:
            wire.hello()
            wire.ask({"op": "announce", "recipes": [], "profile": "job"})
        assert_loads(node, NAMES[1:], "pack")


def test_a_warm_start_of_a_hundred_kernels_asks_an_nfs_server_a_few_times(
    tmp_path: Path, interposer: Interposer
) -> None:
    """A call below the store is about one request: open, list, stat, read of a MiB, …"""
    names = [f"k{n}" for n in range(100)]
    store = filled(tmp_path / "store", names=names)
    save_part(store.root / "v2" / "profiles" / "job", [recipe_of(name) for name in names])
    calls = [interposer.stall(call, below=store.root, seconds=0) for call in CALLS]
    counted = {}
    for source in ("pack", "store"):
        before = sum(call.hits for call in calls)
        with job(store.root) as node:
            agent = start_agent(node, NO_SWEEP, interposer.environ)
            assert_loads(node, names, source)
            end_agent(agent.pid)
        counted[source] = sum(call.hits for call in calls) - before
        if source == "pack":
            shutil.rmtree(packs_directory(store.root, "job"))
            packs_directory(store.root, "job").touch()  # so that there is no new one
    assert counted["pack"] <= 35
    assert counted["store"] > 10 * len(names), "so the calls were counted"


def test_a_node_that_has_the_kernels_already_reads_the_pack_only_if_a_rank_asks(
    tmp_path: Path, interposer: Interposer
) -> None:
    store = filled(tmp_path / "store")
    opens, reads = (interposer.stall(call, below=store.root / "v2" / "packs", seconds=0) for call in ("open", "read"))
    with job(store.root) as node:

        def restarted(*, asks: bool, reads_it: bool) -> None:
            looked, before = opens.hits, reads.hits
            agent = start_agent(node, environ=interposer.environ)
            until(lambda: opens.hits > looked)
            if asks:
                assert_loads(node, NAMES, "pack")
            assert node.status()["agent"]
            end_agent(agent.pid)
            assert (reads.hits > before) == reads_it

        restarted(asks=True, reads_it=True)
        until(lambda: list((node.directory / "packs").glob("*")))
        restarted(asks=False, reads_it=False)
        shutil.rmtree(node.directory / "objects")
        restarted(asks=True, reads_it=True)


# --- faults ---


def test_a_pack_that_is_none_costs_the_look_ups_and_one_line(tmp_path: Path) -> None:
    """Other damage, and other signatures: `tests/unit/packs/test_pack.py`."""
    store = filled(tmp_path / "store")
    packs_of(store.root, "job")[0].write_bytes(b"kcoord-pack-1\nx" + bytes(7) + b"\x01")
    with job(store.root) as node:
        agent = node.start()
        assert_loads(node, NAMES, "store")
        assert log_of(node).count("the pack of job is not used") == 1
        end_agent(agent.pid)
    (path,) = packs_of(store.root, "job")
    assert packed_in(store, path) == {key_of(name).digest for name in NAMES}, "it was replaced"


def test_a_damaged_artifact_that_the_store_has_lost_is_compiled(tmp_path: Path) -> None:
    store = filled(tmp_path / "store")
    (path,) = packs_of(store.root, "job")
    with look_at_pack(store, path) as packed:
        end, last = len(b"kcoord-pack-1\n") + packed.index.size - 1, NAMES[-1]
    content = path.read_bytes()
    path.write_bytes(content[:end] + bytes([content[end] ^ 1]) + content[end + 1 :])
    lose_objects(store)
    with job(store.root) as node:
        node.start()
        client = node.client()
        lead = claim(node, client, last)
        assert isinstance(lead, Lead), "the pack's READY was void"
        assert client.publish(lead, key_of(last), stage(home_of(node, last)), home_of(node, last), 0.5, "no device")
        until(lambda: store.fetch(key_of(last).digest) is not None)


def test_a_kernel_for_which_the_node_has_no_place_is_compiled_whatever_the_pack_states(tmp_path: Path) -> None:
    """The pack states it again and again; its READY was void."""
    store = filled(tmp_path / "store")
    with job(store.root) as node:
        node.start()
        client = node.client()
        (node.directory / "homes").touch()  # where a directory is to be
        lead = node.claim(client, "k1")
        assert isinstance(lead, Lead)
        client.give_up(lead, key_of("k1"))
        assert_loads(node, ["k1"], "pack")


@pytest.mark.serial
@pytest.mark.parametrize("call", ["open", "read"])
def test_a_pack_that_hangs_keeps_claims_waiting_for_a_second_in_all(
    tmp_path: Path, interposer: Interposer, call: str
) -> None:
    """A stripe of the file system is gone; the rest answers."""
    store = filled(tmp_path / "store")
    stall = interposer.stall(call, below=store.root / "v2" / "packs", seconds=HANGS)
    with job(store.root) as node:
        agent = start_agent(node, environ=interposer.environ)
        begun = time.monotonic()
        assert_loads(node, NAMES, "store")
        took = time.monotonic() - begun
        assert stall.hits
        assert took < 1 + 9, "not a second for each, nor the store's patience"
        end_agent(agent.pid)


def test_the_pack_of_a_store_that_opens_late_is_read_then(tmp_path: Path, interposer: Interposer) -> None:
    """Its server has the many nodes of a job to answer."""
    store = filled(tmp_path / "store")
    packs = store.root / "v2" / "packs"
    late = interposer.stall("open", below=store.root / MARKER, seconds=3, times=1)
    read = interposer.stall("read", below=packs, seconds=0)
    with job(store.root) as node:
        start_agent(node, environ=interposer.environ)
        until(lambda: read.hits)
        assert late.hits
        client = node.client()
        assert [claim(node, client, name) for name in NAMES][-1] == Ready("pack")
