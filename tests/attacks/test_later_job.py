"""A later job of the same user: the agent of an earlier one, with less trust, does not serve it."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from kcoord.artifacts import local
from kcoord.artifacts.local import Artifact
from kcoord.artifacts.store import Store
from kcoord.keys.cache_key import CacheKey
from kcoord.rank.client import Alone, Lead
from kcoord.rank.coordinator import Coordinator, Request
from kcoord.settings import Settings
from kcoord.testing.stores import FILES, manifest_of
from tests.support.agents import Node, key_of, stage, until
from tests.support.command import KCOORD
from tests.support.sandbox import PROGRAMS, Sandbox, eventually
from tests.support.signing import OURS, THEIRS, trust

RANK = PROGRAMS / "generic_rank.py"
SIGNED = {"KCOORD_SIGNING_KEY": OURS, "KCOORD_TRUST": "require"}


def counters(sandbox: Sandbox, *command: str | Path, **settings: str | None) -> tuple[Counter[str], str]:
    """A rank's counters of one kernel, and what it told."""
    done = sandbox.run_kcoord(*(command or (RANK, "1", "0")), KCOORD_STORE=str(sandbox.root / "store"), **settings)
    assert done.returncode == 0, done.stderr
    return Counter(json.loads(done.stdout.splitlines()[-1])["counters"]), done.stderr


def earlier_job(sandbox: Sandbox, **settings: str) -> None:
    """Its agent goes on; what it compiled is in the store, and no more on this node."""
    counters(sandbox, **settings)
    assert sandbox.processes()
    eventually(lambda: list((sandbox.root / "store" / "v2" / "objects").glob("*/*")))
    for objects in list(sandbox.local.rglob("objects")):
        shutil.rmtree(objects)


@pytest.mark.parametrize(
    "earlier", [{}, {"KCOORD_SIGNING_KEY": OURS, "KCOORD_TRUST": "off"}, {"KCOORD_SIGNING_KEY": THEIRS}]
)
def test_a_job_that_requires_signatures_is_not_served_by_an_agent_that_does_not(
    sandbox: Sandbox, earlier: dict[str, str]
) -> None:
    earlier_job(sandbox, **earlier)
    unsigned = next((sandbox.root / "store" / "v2" / "objects").glob("*/*"))
    if earlier.get("KCOORD_TRUST") == "off":
        from tests.support.signing import unsigned as strip

        strip(unsigned)
    found, _ = counters(sandbox, **SIGNED)
    assert (found["compiles"], found["store_hits"], found["alone"]) == (1, 0, 0), "by an agent of its own"


def test_at_an_explicit_socket_it_runs_without_that_agent_and_says_so_in_one_line(sandbox: Sandbox) -> None:
    socket = {"KCOORD_SOCKET": str(sandbox.root / "one.sock")}
    earlier_job(sandbox, KCOORD_SIGNING_KEY=OURS, KCOORD_TRUST="off", **socket)
    found, told = counters(sandbox, **SIGNED, **socket)
    assert (found["compiles"], found["store_hits"], found["alone"]) == (1, 0, 1)
    (line,) = [line for line in told.splitlines() if "kcoord" in line]
    assert "KCOORD_SOCKET" in line
    assert "KCOORD_TRUST" in line


@pytest.mark.parametrize("policy", ["require", "off"])
def test_a_rank_whose_launcher_keeps_the_key_agrees_with_its_agent(sandbox: Sandbox, policy: str) -> None:
    key = sandbox.root / "keys"
    key.write_text(OURS.replace(":", " "))
    key.chmod(0o600)
    for given in ({"KCOORD_SIGNING_KEY": OURS}, {"KCOORD_SIGNING_KEY_FILE": str(key)}):
        settings = {**given, "KCOORD_TRUST": policy, "KCOORD_LOCAL_DIR": str(sandbox.root / next(iter(given)))}
        found, told = counters(sandbox, *KCOORD, "exec", "--", sys.executable, RANK, "1", "0", **settings)
        assert found["alone"] == 0, told
        assert found["compiles"] + found["store_hits"] == 1


def test_a_launched_rank_is_not_served_by_another_agent_at_its_socket(sandbox: Sandbox) -> None:
    socket = {"KCOORD_SOCKET": str(sandbox.root / "one.sock")}
    earlier_job(sandbox, **socket)
    found, _ = counters(sandbox, *KCOORD, "exec", "--", sys.executable, RANK, "1", "0", **SIGNED, **socket)
    assert (found["compiles"], found["store_hits"], found["alone"]) == (1, 0, 1)


def test_a_job_that_asks_for_nothing_may_use_an_agent_that_requires_signatures(sandbox: Sandbox) -> None:
    """A sidecar's: the other containers of its pod know no keys."""
    socket = {"KCOORD_SOCKET": str(sandbox.root / "one.sock")}
    earlier_job(sandbox, **SIGNED, **socket)
    found, _ = counters(sandbox, **socket)
    assert (found["store_hits"], found["alone"]) == (1, 0)


def fetched_by_a_job_without_keys(sandbox: Sandbox) -> dict[str, str]:
    """The settings of a store with an artifact that nobody signed, and that an earlier job has fetched to this node."""
    earlier_job(sandbox)
    found, _ = counters(sandbox)
    assert found["store_hits"] == 1
    return {"KCOORD_STORE": str(sandbox.root / "store")}


def test_what_an_earlier_job_fetched_unsigned_is_not_loaded_where_signatures_are_required(sandbox: Sandbox) -> None:
    fetched_by_a_job_without_keys(sandbox)
    found, told = counters(sandbox, **SIGNED)
    assert (found["compiles"], found["local_hits"], found["store_hits"]) == (1, 0, 0), told
    found, _ = counters(sandbox, **SIGNED)
    assert found["local_hits"] == 1, "its own"


@pytest.mark.parametrize("policy", ["require", "off"])
def test_what_was_fetched_unsigned_is_not_signed_when_the_store_loses_it(sandbox: Sandbox, policy: str) -> None:
    """Its writer takes it away, so that a node with a key publishes its copy."""
    store = Path(fetched_by_a_job_without_keys(sandbox)["KCOORD_STORE"])
    (home,) = sandbox.local.glob("objects/*/*/kcoord-manifest.msgpack")
    Store(store).home(home.parent.name).unlink()
    shutil.rmtree(store / "v2" / "leases")
    again, told = counters(sandbox, **{**SIGNED, "KCOORD_TRUST": policy})
    assert again["compiles"] == (policy == "require"), told
    eventually(lambda: Store(store).manifest_bytes(home.parent.name) is not None or policy == "off")
    encoded = Store(store).manifest_bytes(home.parent.name)
    assert (encoded is not None and trust(OURS).verifies("manifest", encoded)) == (policy == "require")


def test_nothing_of_a_cache_directory_that_the_user_named_is_loaded_or_signed_where_signatures_are_required(
    sandbox: Sandbox,
) -> None:
    """`TRITON_CACHE_DIR` outlives jobs; one without a key has filled it from the store."""
    key, home = CacheKey.of("test", "k"), sandbox.root / "cache" / "home"
    local.install(manifest_of(key=key), FILES, home)
    for policy, loads in (("off", True), ("require", False)):
        settings = Settings.from_environ(sandbox.env(KCOORD_SPAWN="0", KCOORD_SIGNING_KEY=OURS, KCOORD_TRUST=policy))
        coordinator = Coordinator(settings)
        try:
            assert (coordinator.find(key, home) is not None) == loads
            found = coordinator.request(Request(key, home))
            assert isinstance(found, Artifact) == loads
            if not isinstance(found, Artifact):
                (found.staging / "kernel").write_text("ours")
                made = found.publish()
                assert made.path.is_relative_to(settings.local_dir)
        finally:
            coordinator.close()


def test_an_agent_that_requires_signatures_copies_nothing_from_a_home_that_it_has_not_filled(
    sandbox: Sandbox,
) -> None:
    """A rank that requires none names a directory in which an earlier job's artifact lies."""
    with Node(signing_key=OURS, store=str(sandbox.root / "store")) as node:
        node.start()
        key = key_of("k")
        theirs = node.directory / "theirs" / "home"
        local.install(manifest_of(key=key), FILES, theirs)
        client = node.client()
        answer = client.claim(key, theirs)
        assert isinstance(answer, Lead), "it is not taken for an artifact of this agent"
        client.give_up(answer, key)


def test_an_artifact_that_a_publish_meets_at_its_home_goes_to_no_rank_that_requires_signatures(
    sandbox: Sandbox,
) -> None:
    """Of two ranks of one agent, one requires signatures, and the other publishes where an earlier job's artifact lies."""
    with Node(signing_key=OURS, store=str(sandbox.root / "store"), store_create="1") as node:
        agent = node.start()
        client, waiting, key = node.client(), node.client(), key_of("k")
        theirs = node.directory / "theirs" / "home"
        lead = client.claim(key, theirs)
        assert isinstance(lead, Lead)
        staging = stage(theirs)
        local.install(manifest_of(key=key), FILES, theirs)  # an agent with less trust fetched it
        answer = node.claiming(waiting, "k")
        until(lambda: node.flight("k").get("waiting"))
        assert client.publish(lead, key, staging, theirs, 0.5, "no device")
        assert isinstance(answer.result(30), Alone)
        assert not node.home("k").exists()
        agent.terminate()
        agent.wait(60)  # for its publishes
        assert Store(sandbox.root / "store").manifest_bytes(key.digest) is None, "it is not signed"
