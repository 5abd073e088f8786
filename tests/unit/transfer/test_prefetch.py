"""What a profile's jobs needed is on a node before its job starts: bounded, verified, and never a reason to fail."""

from __future__ import annotations

import asyncio
import json
import os
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

from kcoord.agent.chores.chore import Chores
from kcoord.agent.chores.requested import RequestedRecorder
from kcoord.artifacts import local
from kcoord.artifacts.manifest import Manifest
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import MARKER
from kcoord.errors import StoreError
from kcoord.profiles.packs import packs_of
from kcoord.profiles.requested import RequestedArtifact, load_requested, requested_directory, save_requested
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord.transfer import prefetch as prefetch_module
from kcoord.transfer.pack import write_pack
from kcoord.transfer.prefetch import prefetch
from tests.support.agents import key_of
from tests.support.sandbox import PROGRAMS, Sandbox, eventually, finish, sandboxed

KCOORD = ("-c", "from kcoord.cli import main; main()")
DIGESTS = [f"{n:064x}" for n in range(20)]


def need(n: int) -> RequestedArtifact:
    return RequestedArtifact(DIGESTS[n], f"objects/{DIGESTS[n][:2]}/{DIGESTS[n]}")


# Needs on disk.


def test_needs_of_several_agents_are_merged_each_once_in_the_order_of_asking(tmp_path: Path) -> None:
    first = save_requested(tmp_path, [need(3), need(1)])
    os.utime(first, (1, 1))
    save_requested(tmp_path, [need(2), need(3)])
    assert load_requested(tmp_path) == [need(2), need(3), need(1)], "the newest file first"


def test_equal_agents_write_one_file_and_a_larger_one_takes_its_place(tmp_path: Path) -> None:
    first = save_requested(tmp_path, [need(1), need(2)])
    assert save_requested(tmp_path, [need(2), need(1)]) == first
    larger = save_requested(tmp_path, [need(1), need(2), need(3)], first)
    assert list(tmp_path.iterdir()) == [larger]


def test_nothing_is_needed_where_nothing_was_noted(tmp_path: Path) -> None:
    assert load_requested(tmp_path / "missing") == []


@pytest.mark.parametrize("damage", [b"", b"x", b"kcoord-needs-1\n" + bytes(32) + b"\x90"])
def test_a_file_that_is_torn_is_skipped(tmp_path: Path, damage: bytes) -> None:
    save_requested(tmp_path, [need(1)])
    (tmp_path / "a.needs").write_bytes(damage)
    (tmp_path / "b.needs").symlink_to("/etc/passwd")
    (tmp_path / "c.needs").mkdir()
    assert load_requested(tmp_path) == [need(1)]


@pytest.mark.parametrize(
    "place",
    [
        "../x",
        "/etc/passwd",
        "agent.sock",
        "profiles/job",
        "triton/.kcoord",
        "triton/a/b",
        "objects/ab",
        "triton/",
        "triton/a\n",
    ],
)
def test_a_place_outside_the_tiers_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(ValueError, match="no place"):
        RequestedArtifact(DIGESTS[0], place)


def test_a_directory_that_cannot_be_listed_is_an_error_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError):
        load_requested(tmp_path / "file")


# Noting.


def test_what_a_disk_refused_to_note_is_noted_when_it_is_well_again(tmp_path: Path) -> None:
    """A job that asks for nothing more: it is pinned, and prefetched, by what it has asked for."""
    Store(tmp_path).open()
    (tmp_path / "v2" / "needs").touch()  # in the way
    notices = Notices()
    recorder = RequestedRecorder(tmp_path, tmp_path / "local", "job", notices)

    async def scenario() -> None:
        recorder.note("ab" * 32, str(tmp_path / "local" / "triton" / "X"))
        chores = Chores(recorder.chores)
        chores.pulse()
        while not notices.since(0)[0]:
            await asyncio.sleep(0.005)
        (tmp_path / "v2" / "needs").unlink()
        await chores.drain(60)

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert load_requested(requested_directory(tmp_path, "job")) == [RequestedArtifact("ab" * 32, "triton/X")]


def test_artifacts_that_an_earlier_job_noted_cost_the_store_one_look(tmp_path: Path) -> None:
    """A warm job asks for the same ones for as long as it starts: nothing is to be written."""
    Store(tmp_path).open()
    save_requested(requested_directory(tmp_path, "job"), [need(0), need(1)])
    recorder = RequestedRecorder(tmp_path, tmp_path / "local", "job", notices := Notices())
    recorder.note(need(0).digest, str(tmp_path / "local" / need(0).place))
    asyncio.run(recorder._record())
    (tmp_path / MARKER).unlink()  # a second look would find no store
    recorder.note(need(1).digest, str(tmp_path / "local" / need(1).place))
    asyncio.run(recorder._record())
    assert not notices.since(0)[0]
    recorder.note(need(2).digest, str(tmp_path / "local" / need(2).place))
    asyncio.run(recorder._record())
    assert len(notices.since(0)[0]) == 1


def test_an_agent_without_a_profile_or_a_store_notes_nothing(tmp_path: Path) -> None:
    for store, profile in ((None, "job"), (tmp_path, None)):
        recorder = RequestedRecorder(store, tmp_path / "local", profile, Notices())
        recorder.note(DIGESTS[0], str(tmp_path / "local" / need(0).place))
        asyncio.run(Chores(recorder.chores).drain(60))
    assert not list(tmp_path.rglob("*.needs"))


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
    needs = load_requested(requested_directory(recorded, "job"))
    assert len(write_pack(Store(recorded), "job", [need.digest for need in needs])) == 5
    shutil.rmtree(recorded / "v2" / "objects")
    assert "5 artifacts" in fetch(sandbox).stderr
    done = sandbox.run_kcoord(PROGRAMS / "generic_rank.py", "5", "0", KCOORD_SPAWN="0")
    assert done.returncode == 0, done.stderr


def test_what_a_damaged_pack_lacks_is_looked_up(sandbox: Sandbox, recorded: Path) -> None:
    needs = load_requested(requested_directory(recorded, "job"))
    write_pack(Store(recorded), "job", [need.digest for need in needs])
    (path,) = packs_of(recorded, "job")
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert "5 artifacts" in fetch(sandbox).stderr


def test_what_is_there_is_not_fetched_again(sandbox: Sandbox, recorded: Path) -> None:
    fetch(sandbox)
    assert "0 artifacts" in (line := fetch(sandbox).stderr)
    assert "5 were there" in line


def test_what_the_store_has_no_more_is_passed_over(sandbox: Sandbox, recorded: Path) -> None:
    needs = load_requested(requested_directory(recorded, "job"))
    Store(recorded).home(needs[0].digest).unlink()
    assert "4 artifacts" in (line := fetch(sandbox).stderr)
    assert "1 are not in the store" in line


def test_what_does_not_verify_is_not_installed(sandbox: Sandbox, recorded: Path) -> None:
    needs = load_requested(requested_directory(recorded, "job"))
    payload = Store(recorded).home(needs[0].digest)
    payload.write_bytes(payload.read_bytes()[:-1] + b"x")
    found = prefetch(settings_of(sandbox, recorded), timeout=60, most=1 << 30, say=print)
    assert (found.fetched, found.missing, found.why) == (4, 1, "")
    assert not (sandbox.local / needs[0].place).exists()


def test_a_need_that_names_another_keys_place_harms_nobody(sandbox: Sandbox, recorded: Path) -> None:
    one, other, *_ = load_requested(requested_directory(recorded, "job"))
    save_requested(requested_directory(recorded, "job"), [RequestedArtifact(one.digest, other.place)])
    fetch(sandbox)
    done = sandbox.run_kcoord(PROGRAMS / "generic_rank.py", "5", "0", KCOORD_SPAWN="0")
    assert done.returncode == 0, done.stderr


def test_no_more_is_fetched_than_it_may(sandbox: Sandbox, recorded: Path) -> None:
    found = prefetch(settings_of(sandbox, recorded), timeout=60, most=0, say=print)
    assert (found.needed, found.fetched, found.why) == (5, 0, "0 MiB are enough")
    assert "5 left for when they are asked for" in str(found)


def test_of_what_is_fetched_at_once_no_more_is_in_memory_than_it_may(
    sandbox: Sandbox, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An init container that is killed for its memory fails its pod."""
    sizes, at_once, most_at_once, counting = [], 0, 0, threading.Lock()
    for need in load_requested(requested_directory(recorded, "job")):
        stated = Store(recorded).manifest_bytes(need.digest)
        assert stated is not None
        sizes.append(Manifest.decode(stated).size)
    real = Store.fetch

    def watched(self: Store, digest: str, announced: str | None = None) -> object:
        nonlocal at_once, most_at_once
        with counting:
            at_once += 1
            most_at_once = max(most_at_once, at_once)
        try:
            time.sleep(0.02)  # the others would come now
            return real(self, digest, announced)
        finally:
            with counting:
                at_once -= 1

    monkeypatch.setattr(Store, "fetch", watched)
    monkeypatch.setattr(prefetch_module, "_MOST_IN_MEMORY", 2 * max(sizes))
    found = prefetch(settings_of(sandbox, recorded), timeout=60, most=1 << 30, say=print)
    assert (found.fetched, found.why, most_at_once) == (5, "", 1)

    shutil.rmtree(sandbox.local)
    monkeypatch.setattr(prefetch_module, "_MOST_IN_MEMORY", 2 * max(sizes) - 1)
    found = prefetch(settings_of(sandbox, recorded), timeout=60, most=1 << 30, say=print)
    assert found.fetched == sum(size < max(sizes) for size in sizes)
    assert "more memory than there is" in found.why


def test_it_ends_in_time_from_a_store_that_hangs(
    sandbox: Sandbox, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "fetch", lambda self, digest, announced=None: time.sleep(3600))
    begun = time.monotonic()
    found = prefetch(settings_of(sandbox, recorded), timeout=0.3, most=1 << 30, say=print)
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
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import MARKER
from kcoord.cli import main

def hang(store, digest, announced=None):
    fresh = pathlib.Path(f"fresh-{threading.get_ident()}")  # others hang, too
    fresh.write_text(str(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0)))  # PR_GET_DUMPABLE
    fresh.replace("begun")
    time.sleep(3600)

Store.fetch = hang
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
    from kcoord.profiles.parts import load_profile, save_part
    from kcoord.profiles.recipe import Recipe

    save_part(recorded / "v2" / "profiles" / "job", [Recipe("python", "m", "f", {}, "", 1.0, 1)])
    fetch(sandbox)
    alone = Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.local)})
    assert [r.qualname for r in load_profile(alone, "job")] == ["f"]


def test_the_profile_comes_first_since_its_kernels_may_take_all_the_time_there_is(
    sandbox: Sandbox, recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it no kernel that was left out is compiled together, and a `kcoord warmup` in the pod fails."""
    from kcoord.profiles.parts import load_profile, save_part
    from kcoord.profiles.recipe import Recipe

    save_part(recorded / "v2" / "profiles" / "job", [Recipe("python", "m", "f", {}, "", 1.0, 1)])
    begun = threading.Event()
    monkeypatch.setattr(Store, "fetch", lambda self, digest, announced=None: begun.set() or time.sleep(3600))
    assert "0.3 s are over" in str(prefetch(settings_of(sandbox, recorded), timeout=0.3, most=1 << 30, say=print))
    assert begun.wait(30)
    assert [r.qualname for r in load_profile(replace(settings_of(sandbox, recorded), store=None), "job")] == ["f"]
