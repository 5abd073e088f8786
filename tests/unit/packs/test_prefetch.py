"""What a profile's jobs needed is on a node before its job starts: bounded, verified, and never a reason to fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from kcoord.artifacts import local
from kcoord.artifacts.store import Store
from kcoord.packs.index import Use
from kcoord.packs.pack import Pack, look_at_pack
from kcoord.packs.pack_files import packs_of
from kcoord.packs.prefetch import prefetch
from kcoord.packs.writing import write_pack
from kcoord.settings import Settings
from tests.support.agents import key_of
from tests.support.packs import listed_in
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish, sandboxed

KCOORD = ("-c", "from kcoord.cli import main; main()")
# From one node to another, by way of the store.


@pytest.fixture(scope="module")
def published() -> Iterator[Path]:
    """A store to which a job of two ranks and five keys has published."""
    with sandboxed() as sandbox:
        yield _record(sandbox)


@pytest.fixture
def recorded(sandbox: Sandbox, published: Path) -> Path:
    """A copy of it, on a node that has nothing of it."""
    store = sandbox.root / "store"
    shutil.copytree(published, store)
    return store


def listed(root: Path) -> list[Use]:
    """What the pack of the job lists."""
    return list(listed_in(Store(root), packs_of(root, "job")[0]).values())


def _record(sandbox: Sandbox) -> Path:
    store = sandbox.root / "store"
    here = {"KCOORD_STORE": str(store), "KCOORD_PROFILE": "job", "KCOORD_LOCAL_DIR": str(sandbox.root / "first")}
    agent = sandbox.fork_kcoord(*KCOORD, "agent", **here)
    eventually(lambda: list((sandbox.root / "first").glob("*.sock")))
    ranks = [sandbox.fork_kcoord(PROGRAMS / "generic_rank.py", "5", "0", RANK=str(n), **here) for n in range(2)]
    for rank in ranks:
        done = finish(rank)
        assert done.returncode == 0, done.stderr
    agent.terminate()
    assert finish(agent).returncode == 0
    return store


def settings_of(sandbox: Sandbox, store: Path, **more: str) -> Settings:
    return Settings.from_environ(
        {"KCOORD_STORE": str(store), "KCOORD_LOCAL_DIR": str(sandbox.local), "KCOORD_PROFILE": "job", **more}
    )


def fetch(sandbox: Sandbox, *arguments: str, **more: str | None) -> subprocess.CompletedProcess[str]:
    """As an init container does."""
    store = {"KCOORD_STORE": str(sandbox.root / "store"), "KCOORD_PROFILE": "job"}
    done = sandbox.run_kcoord(*KCOORD, "agent", "--prefetch", *arguments, **{**store, **more})
    assert done.returncode == 0, done.stderr
    return done


def test_a_node_has_what_the_job_needs_before_it_starts(sandbox: Sandbox, recorded: Path) -> None:
    assert "5 artifacts" in fetch(sandbox).stderr
    done = sandbox.run_kcoord(PROGRAMS / "generic_rank.py", "5", "0", KCOORD_SPAWN="0")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])["counters"]
    assert (report["local_hits"], report["compiles"]) == (5, 0), "without an agent, and without the store"


def test_a_pack_brings_all_of_it_without_a_look_at_the_stores_artifacts(sandbox: Sandbox, recorded: Path) -> None:
    shutil.rmtree(recorded / "v2" / "objects")
    assert "5 artifacts" in fetch(sandbox).stderr
    done = sandbox.run_kcoord(PROGRAMS / "generic_rank.py", "5", "0", KCOORD_SPAWN="0")
    assert done.returncode == 0, done.stderr


def test_what_a_damaged_pack_lacks_is_left_for_when_it_is_asked_for(sandbox: Sandbox, recorded: Path) -> None:
    (path,) = packs_of(recorded, "job")
    with look_at_pack(Store(recorded), path) as pack:
        last = len(b"kcoord-pack-1\n") + pack.index.size - 1
    content = path.read_bytes()
    path.write_bytes(content[:last] + bytes([content[last] ^ 1]) + content[last + 1 :])
    assert "4 artifacts" in (line := fetch(sandbox).stderr)
    assert "1 left for when they are asked for" in line


def test_what_is_there_is_not_fetched_again(sandbox: Sandbox, recorded: Path) -> None:
    fetch(sandbox)
    assert "0 artifacts" in (line := fetch(sandbox).stderr)
    assert "5 were there" in line


def test_a_pack_that_names_another_keys_place_harms_nobody(sandbox: Sandbox, recorded: Path) -> None:
    one, other, *rest = listed(recorded)
    uses = [replace(one, place=other.place), replace(other, place="triton/X"), *rest]
    write_pack(Store(recorded), "job", uses)
    assert "3 artifacts" in fetch(sandbox).stderr
    done = sandbox.run_kcoord(PROGRAMS / "generic_rank.py", "5", "0", KCOORD_SPAWN="0")
    assert done.returncode == 0, done.stderr


def test_it_ends_in_time_from_a_store_that_hangs(
    sandbox: Sandbox, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pack, "fetch", lambda self, digest, announced=None: time.sleep(3600))
    begun = time.monotonic()
    found = prefetch(settings_of(sandbox, recorded), timeout=0.3)
    assert time.monotonic() - begun < 30
    assert "0.3 s are over" in str(found)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"KCOORD_PROFILE": None}, "KCOORD_PROFILE is not set"),
        ({"KCOORD_PROFILE": ""}, "KCOORD_PROFILE is not set"),
        ({"KCOORD_PROFILE": "first-job"}, "0 artifacts"),
        ({"KCOORD_STORE": None}, "KCOORD_STORE is not set"),
        ({"KCOORD_STORE": "/proc/nowhere"}, "0 artifacts"),
        ({"KCOORD_LOCAL_DIR": "/proc/nowhere"}, "0 artifacts"),
        ({"KCOORD_LEASE_TTL": "soon"}, "KCOORD_LEASE_TTL"),
        ({"KCOORD_PROFILE": "../x"}, "KCOORD_PROFILE"),
        ({"KCOORD_DISABLE": "1"}, "KCOORD_DISABLE"),
        ({"KCOORD_TRUST": "require"}, "KCOORD_TRUST"),
    ],
)
def test_it_never_fails_the_pod(sandbox: Sandbox, more: dict[str, str | None], said: str) -> None:
    assert said in fetch(sandbox, **more).stderr


_HANGS = """
import ctypes, pathlib, sys, threading, time
from kcoord.cli import main
from kcoord.packs.pack import Pack

def hang(pack, digest, announced=None):
    fresh = pathlib.Path(f"fresh-{threading.get_ident()}")  # others hang, too
    fresh.write_text(str(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)))  # PR_GET_DUMPABLE
    fresh.replace("begun")
    time.sleep(3600)

Pack.fetch = hang
main()
"""


def test_a_pod_that_is_deleted_does_not_wait_for_it(sandbox: Sandbox, recorded: Path) -> None:
    """It is the first process of its container, which ends by no signal that it does not handle."""
    apart = ("unshare", "--pid", "--fork", "--kill-child")
    if shutil.which("unshare") is None or subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make pid namespaces")
    command = [*apart, sys.executable, "-c", _HANGS, "agent", "--prefetch"]
    given = {"KCOORD_STORE": str(recorded), "KCOORD_PROFILE": "job"}
    process = sandbox.start("-c", f"import os; os.execvp('unshare', {command!r})", **given)
    eventually((sandbox.root / "begun").exists, what="it fetches")
    assert (sandbox.root / "begun").read_text() == "0", "others may read its environment"
    (first,) = psutil.Process(process.pid).children()
    first.terminate()
    assert finish(process, 20).returncode == 0


def test_a_warm_up_beside_the_agent_needs_no_store(sandbox: Sandbox, recorded: Path) -> None:
    """The profile comes with what it names, if there is one to replay."""
    assert not local.is_whole(sandbox.local / "objects", key_of("x").digest)
    from kcoord.packs.recipe import Recipe
    from kcoord.packs.recipe_files import load_profile, save_part

    save_part(recorded / "v2" / "profiles" / "job", [Recipe("python", "m", "f", {}, "", 1.0, 1)])
    fetch(sandbox)
    alone = Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local)})
    assert [r.qualname for r in load_profile(alone, "job")] == ["f"]


def test_the_profile_comes_first_since_its_kernels_may_take_all_the_time_there_is(
    sandbox: Sandbox, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it no kernel that was left out is compiled together, and a `kcoord warmup` in the pod fails."""
    from kcoord.packs.recipe import Recipe
    from kcoord.packs.recipe_files import load_profile, save_part

    save_part(recorded / "v2" / "profiles" / "job", [Recipe("python", "m", "f", {}, "", 1.0, 1)])
    begun = threading.Event()
    monkeypatch.setattr(Pack, "fetch", lambda self, digest, announced=None: begun.set() or time.sleep(3600))
    assert "0.3 s are over" in str(prefetch(settings_of(sandbox, recorded), timeout=0.3))
    assert begun.wait(30)
    assert [r.qualname for r in load_profile(replace(settings_of(sandbox, recorded), store=None), "job")] == ["f"]
