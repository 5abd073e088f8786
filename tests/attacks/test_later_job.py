"""A later job of the same user: the agent of an earlier one, with less trust, does not serve it."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from kcoord.artifacts import local
from kcoord.artifacts.store import Store
from kcoord.errors import ArtifactInvalid
from kcoord.packs.prefetch import prefetch
from kcoord.packs.recipe_files import load_profile, save_part
from kcoord.settings import Settings
from tests.support.command import KCOORD
from tests.support.profiles import recipe
from tests.support.sandbox import PROGRAMS, Sandbox, eventually
from tests.support.signing import OURS, THEIRS, opened, trust

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
    shutil.rmtree(sandbox.local / "objects")


@pytest.mark.parametrize(
    "earlier", [{}, {"KCOORD_SIGNING_KEY": OURS, "KCOORD_TRUST": "warn"}, {"KCOORD_SIGNING_KEY": THEIRS}]
)
def test_a_job_that_requires_signatures_is_not_served_by_an_agent_that_does_not(
    sandbox: Sandbox, earlier: dict[str, str]
) -> None:
    earlier_job(sandbox, **earlier)
    unsigned = next((sandbox.root / "store" / "v2" / "objects").glob("*/*"))
    if earlier.get("KCOORD_TRUST") == "warn":
        from tests.support.signing import unsigned as strip

        strip(unsigned)
    found, _ = counters(sandbox, **SIGNED)
    assert (found["compiles"], found["store_hits"], found["alone"]) == (1, 0, 0), "by an agent of its own"


@pytest.mark.parametrize(
    "earlier", [{}, {"KCOORD_SIGNING_KEY": OURS, "KCOORD_TRUST": "warn"}, {"KCOORD_SIGNING_KEY": THEIRS}]
)
def test_at_an_explicit_socket_it_runs_without_that_agent_and_says_so_in_one_line(
    sandbox: Sandbox, earlier: dict[str, str]
) -> None:
    socket = {"KCOORD_SOCKET": str(sandbox.root / "one.sock")}
    earlier_job(sandbox, **earlier, **socket)
    found, told = counters(sandbox, **SIGNED, **socket)
    assert (found["compiles"], found["store_hits"], found["alone"]) == (1, 0, 1)
    (line,) = [line for line in told.splitlines() if "kcoord" in line]
    assert "KCOORD_SOCKET" in line
    assert "KCOORD_TRUST" in line


@pytest.mark.parametrize("policy", ["require", "warn"])
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


def test_what_was_fetched_unsigned_is_not_signed_when_the_store_loses_it(sandbox: Sandbox) -> None:
    """Its writer takes it away, so that a node with a key, and KCOORD_TRUST=warn, publishes its copy."""
    store = Path(fetched_by_a_job_without_keys(sandbox)["KCOORD_STORE"])
    (home,) = sandbox.local.glob("objects/*/*/kcoord-manifest.msgpack")
    digest = home.parent.name
    Store(store).home(digest).unlink()
    warns = trust(OURS, policy="warn")
    found = local.read_artifact(home.parent, digest)
    assert found is not None
    Store(store, warns).publish(found[0].manifest, found[1])
    encoded = Store(store).manifest_bytes(digest)
    assert encoded is not None
    assert not warns.verifies("manifest", encoded)
    with pytest.raises(ArtifactInvalid, match="fetched before signatures were required"):
        Store(store, trust(OURS)).publish(found[0].manifest, found[1])


def test_a_profile_that_an_earlier_job_fetched_unsigned_is_not_read_where_signatures_are_required(
    sandbox: Sandbox,
) -> None:
    """A recipe names a function, which a rank imports and calls."""
    store = opened(sandbox.root / "store", policy="off")
    save_part(store.root / "v2" / "profiles" / "p", [recipe(66)])
    flags = {"store": str(store.root), "local_dir": str(sandbox.local), "profile": "p"}
    prefetch(Settings.from_environ({}, **flags), timeout=60, most=1 << 20, say=print)
    save_part(store.root / "v2" / "profiles" / "p", [recipe(1)], trust=trust(OURS))
    without_store = {**flags, "store": ""}
    assert load_profile(Settings.from_environ({}, **without_store), "p") == [recipe(66)], "it was copied"
    for signing in ({"signing_key": OURS}, {"signing_key": OURS, "trust": "warn"}):
        prefetch(Settings.from_environ({}, **flags, **signing), timeout=60, most=1 << 20, say=print)
        required = Settings.from_environ({}, **{**without_store, **signing, "trust": "require"})
        assert load_profile(required, "p") == [recipe(1)]
        assert load_profile(Settings.from_environ({}, **{**flags, "signing_key": OURS}), "p") == [recipe(1)]
