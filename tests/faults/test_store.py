"""The store is full, read-only, gone, slow or broken: the job goes on with the right bytes, and says why once per node.

Two nodes of two ranks, a real Redis, real agents; the disk is broken for real where this user may mount, and by a library
between the agent and its C library where not.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kcoord.artifacts.store import Store
from kcoord.testing.stores import manifest_of
from tests.support.agents import end_agent, until
from tests.support.artifacts import publish
from tests.support.cluster import BACK, CANNOT, NODES, QUICK, RANKS, UNPRIVILEGED, Cluster, cluster, fill, key_digest
from tests.support.command import KCOORD
from tests.support.interpose import Interposer
from tests.support.mounts import mount, mounted, unmount

_ONLY_READ = "is only read"
Repair = Callable[[], object]


def assert_told_once(made: Cluster, remedy: str) -> None:
    until(lambda: all(CANNOT in log for log in made.logs()))  # ranks have their kernels before it is published
    for log in made.logs():
        assert log.count(CANNOT) == 1, log
        assert log.count(remedy) == 1, log
        assert "Traceback" not in log, log


def assert_survives(made: Cluster, remedy: str, begin: Callable[[], Repair], *, leaves: bool = False) -> None:
    """The story of every fault: before it, during it, after it. `leaves`: what was staged stays until it is swept."""
    made.start()
    made.add_ranks()
    assert made.compiles("before") == 1
    until(lambda: made.holds("before"))
    repair = begin()
    try:
        for name in ("during-a", "during-b"):
            assert 1 <= made.compiles(name) <= NODES
        assert_told_once(made, remedy)
    finally:
        repair()
    until(lambda: all(BACK in log for log in made.logs()))
    assert made.compiles("after") == 1
    until(lambda: made.holds("after"))
    assert leaves or made.left_in_staging() == []
    assert [log.count(BACK) for log in made.logs()] == [1] * NODES
    assert_told_once(made, remedy)


# --- for real ---


@pytest.mark.smoke
def test_a_full_store_costs_one_line_and_is_used_again_when_there_is_room(tmp_path: Path) -> None:
    with mounted(tmp_path / "store", "-t", "tmpfs", "-o", "size=512k", "kcoord-test") as store, cluster(store) as made:

        def begin() -> Repair:
            return fill(store).unlink

        assert_survives(made, "its file system is full: free space", begin)


def test_another_file_system_at_the_staging_directory_costs_one_line(tmp_path: Path) -> None:
    store = tmp_path / "store"
    staging = store / "v2" / "staging"
    with cluster(store) as made, contextlib.ExitStack() as stack:

        def begin() -> Repair:
            stack.enter_context(mounted(staging, "-t", "tmpfs", "kcoord-test"))
            return lambda: unmount(staging)

        assert_survives(made, "it is on another file system than its staging directory", begin)


def test_a_mount_that_vanishes_is_not_replaced_by_the_disk_below_it(tmp_path: Path) -> None:
    store, there = tmp_path / "store", tmp_path / "there"
    there.mkdir()
    with mounted(store, "--bind", str(there)), cluster(store) as made:

        def begin() -> Repair:
            unmount(store)
            return repair

        def repair() -> None:
            assert list(store.iterdir()) == [], "something was written below the mount"
            mount(store, "--bind", str(there))

        assert_survives(made, "it is missing: create it, or mount it", begin)


def _close_to_us(store: Path) -> Repair:
    """What is in the store belongs to another user; without root, to us, who may not write."""
    directories = [path for path in (store, *store.rglob("*")) if path.is_dir()]
    for path in directories:
        if os.getuid() == 0:
            os.chown(path, 65534, 65534)
        path.chmod(0o555)

    def repair() -> None:
        for path in directories:
            path.chmod(0o755)
            if os.getuid() == 0:
                os.chown(path, 0, 0)

    return repair


def test_a_store_that_could_not_be_opened_at_the_start_is_used_as_soon_as_it_can(tmp_path: Path) -> None:
    store = tmp_path / "closed" / "store"
    store.parent.mkdir()
    repair = _close_to_us(store.parent)
    try:
        with cluster(store) as made:
            made.start(UNPRIVILEGED + QUICK)
            made.add_ranks()
            assert 1 <= made.compiles("during") <= NODES
            assert_told_once(made, "permission denied: let this user read and write it")
            repair()
            until(lambda: all(BACK in log for log in made.logs()))
            assert made.compiles("after") == 1
            until(lambda: made.holds("after"))
            assert_told_once(made, "permission denied")
    finally:
        repair()


def _read_only_mount(store: Path) -> Repair:
    subprocess.run(["mount", "-o", "remount,ro", str(store)], check=True, timeout=30)
    return lambda: subprocess.run(["mount", "-o", "remount,rw", str(store)], check=True, timeout=30)


@pytest.mark.parametrize("close", [_read_only_mount, _close_to_us], ids=["a read-only mount", "another user's"])
def test_a_store_that_can_only_be_read_serves_artifacts_and_takes_none(
    tmp_path: Path, close: Callable[[Path], Repair]
) -> None:
    store = tmp_path / "store"
    mount = mounted(store, "-t", "tmpfs", "kcoord-test") if close is _read_only_mount else contextlib.nullcontext()
    with mount, cluster(store) as made:
        made.start()
        made.add_ranks(1)
        made.ask("before")
        until(lambda: made.holds("before"))
        for rank in made.ranks:
            assert rank.end() == 0
        for node in made.nodes:
            for pid in node.agent_pids():
                end_agent(pid)
            shutil.rmtree(node.directory / "objects")
        made.ranks.clear()
        repair = close(store)
        try:
            made.start(UNPRIVILEGED + QUICK)  # the next job
            made.add_ranks()
            assert made.compiles("before") == 0, "it comes from the store"
            for name in ("during-a", "during-b"):
                assert made.compiles(name) == NODES, "nodes do not wait for each other"
                assert not made.holds(name)
            until(lambda: all(_ONLY_READ in log for log in made.logs()))
        finally:
            repair()
        until(lambda: all(BACK in log for log in made.logs()))
        assert made.compiles("after") == 1
        until(lambda: made.holds("after"))
        for log in made.logs():
            assert log.count(_ONLY_READ) == 1, log
            assert CANNOT not in log, log
            assert len(log.splitlines()) == 2, log


def test_nodes_that_cannot_publish_do_not_wait_for_each_other_and_end_without_another_word(tmp_path: Path) -> None:
    """Else a thousand nodes would compile a kernel one after another, since each has nothing to show to the next.

    Agents write their time lines and profiles as they end, which have no room either.
    """
    with mounted(tmp_path / "store", "-t", "tmpfs", "-o", "size=512k", "kcoord-test") as store, cluster(store) as made:
        made.start()
        made.add_ranks()
        made.ask("before")
        fill(store)
        made.ask("during")
        assert_told_once(made, "its file system is full")
        told = made.ask("slow")
        begun = [moment for t in told for moment in t["begun"]]
        assert len(begun) == NODES, "each node compiles once"
        assert max(begun) - min(begun) < 1.0, "one began when the other's second was over"
        for rank in made.ranks:
            assert rank.end() == 0
        for node in made.nodes:
            for pid in node.agent_pids():
                end_agent(pid)
        assert_told_once(made, "its file system is full: free space")


# --- by the C library ---


@pytest.fixture
def interposed(tmp_path: Path, interposer: Interposer) -> Iterator[Cluster]:
    """Agents that meet the interposer's faults; the ranks do not."""
    with cluster(tmp_path / "store") as made:
        made.start = lambda prelude=QUICK: Cluster.start(made, prelude, interposer.environ)  # type: ignore[method-assign]
        yield made


_ERRORS = [
    ("write", errno.ENOSPC, "its file system is full"),
    ("fsync", errno.EDQUOT, "the quota is used up: free space"),
    ("mkdir", errno.EROFS, "read-only file system"),
    ("link", errno.EACCES, "permission denied: let this user read and write it"),
]


def test_every_fault_of_a_store_is_told_once_and_so_is_its_end(interposed: Cluster, interposer: Interposer) -> None:
    made = interposed
    made.start()
    made.add_ranks()
    for number, (call, error, remedy) in enumerate(_ERRORS):
        fault = interposer.fail(call, below=made.store.root / "v2", error=error)
        for key in range(3):
            assert 1 <= made.compiles(f"{call} {key}") <= NODES
        # a node that has published nothing meets it with its time line, within 30 s
        until(lambda remedy=remedy: all(remedy in log for log in made.logs()), 60)
        assert fault.hits
        for log in made.logs():
            assert log.count(remedy) == 1, log
        fault.end()
        until(lambda number=number: all(log.count(BACK) == number + 1 for log in made.logs()))
        assert made.compiles(f"after {call}") == 1
        until(lambda call=call: made.holds(f"after {call}"))
    for log in made.logs():
        assert [log.count(remedy) for _, _, remedy in _ERRORS] == [1] * len(_ERRORS), log
        # a time line may meet a fault first, and tell of it in its own words
        assert log.count(BACK) == len(_ERRORS), log
    assert made.left_in_staging() == []


@pytest.mark.parametrize(("call", "error"), [("open", errno.ESTALE), ("read", errno.EIO)])
def test_a_store_that_cannot_be_read_loses_nothing(
    interposed: Cluster, interposer: Interposer, call: str, error: int
) -> None:
    made = interposed
    made.start()
    made.add_ranks(1)
    first, second = made.ranks
    (told,) = made.ask("k", [first])
    assert told["compiled"] == 1
    until(lambda: made.holds("k"))
    home = made.store.home(key_digest("k"))
    inode = home.stat().st_ino
    fault = interposer.fail(call, below=home, error=error)
    (told,) = made.ask("k", [second])
    assert told["compiled"] == 1, "what cannot be read is compiled"
    assert fault.hits
    fault.end()
    assert made.holds("k")
    assert home.stat().st_ino == inode, "the store's copy was taken away, or replaced"
    assert not (made.store.root / "v2" / "quarantine").exists()
    until(lambda: all(log.count(CANNOT) == log.count(BACK) <= 1 for log in made.logs()))


@pytest.mark.parametrize("call", ["mkdir", "unlink"])
def test_a_request_that_was_sent_again_is_no_fault(interposed: Cluster, interposer: Interposer, call: str) -> None:
    """An NFS server that restarts has forgotten what it did: `mkdir` says EEXIST then, and `unlink` ENOENT."""
    made = interposed
    error = errno.ENOENT if call == "unlink" else errno.EEXIST
    if call == "mkdir":
        made.store.open()  # a path is made from its end: its first EEXIST would be a lie
    fault = interposer.fail(call, below=made.store.root, error=error, done=True)
    made.start()
    made.add_ranks(1)
    assert made.compiles("k") == 1
    until(lambda: made.holds("k"))
    assert fault.hits
    fault.end()
    assert all(CANNOT not in log for log in made.logs())


def test_a_slow_store_is_waited_for_and_nothing_is_said(interposed: Cluster, interposer: Interposer) -> None:
    made = interposed
    made.start()
    made.add_ranks()
    fault = interposer.stall("fsync", below=made.store.root, seconds=1.5, times=1)
    assert made.compiles("slow") == 1, "another node compiled what was under way"
    until(lambda: made.holds("slow"))
    assert fault.hits == 1
    assert all(CANNOT not in log for log in made.logs())


def test_a_store_that_hangs_is_left_alone_until_it_answers(interposed: Cluster, interposer: Interposer) -> None:
    """The bound is a minute; it is shortened here."""
    made = interposed
    shorter = "tiers.StoreBreaker = functools.partial(tiers.StoreBreaker, patience=0.5, looks_within=0.5)"
    made.start(f"{QUICK}\n{shorter}\n")
    made.add_ranks()
    made.ask("before")
    until(lambda: made.holds("before"))
    fault = interposer.stall("open", below=made.store.root, seconds=6)
    for key in range(4):
        assert 1 <= made.compiles(f"hung {key}") <= NODES
    assert_told_once(made, "it has not answered for 0.5 s")
    fault.end()
    until(lambda: all(BACK in log for log in made.logs()))
    assert made.compiles("after") == 1
    until(lambda: made.holds("after"))
    until(lambda: made.left_in_staging() == [])


# --- the local directory ---


def test_a_quota_that_is_used_up_in_the_middle_of_a_compile_costs_a_second_one(
    tmp_path: Path, interposer: Interposer
) -> None:
    with cluster(tmp_path / "store") as made:
        made.start()
        made.add_ranks(**interposer.environ)
        made.ask("before")
        for node in made.nodes:
            interposer.fail("write", below=node.directory / "objects", error=errno.EDQUOT)
        assert max(told["compiled"] for told in made.ask("during")) == 2
        interposer.clear()
        assert made.compiles("after") == 1
        for rank in made.ranks:
            rank.end()
        told = [rank.errors.count("the quota is used up") for rank in made.ranks]
        assert max(told) in (1, 2), "whose compile met the quota says so, and not for each file"


def _alone(made: Cluster, name: str) -> None:
    """Every rank has it, however often it is compiled."""
    told = made.ask(name)
    assert 1 <= sum(t["compiled"] for t in told) <= NODES * RANKS


@contextlib.contextmanager
def local_disks(made: Cluster, *options: str) -> Iterator[list[Path]]:
    """Each node's artifacts on a file system of their own."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(mounted(node.directory / "objects", *options)) for node in made.nodes]


@pytest.mark.parametrize("fault", ["full", "read-only", "vanished"])
def test_a_rank_whose_local_directory_fails_trains_on(tmp_path: Path, fault: str) -> None:
    with (
        cluster(tmp_path / "store") as made,
        local_disks(made, "-t", "tmpfs", "-o", "size=16m,mode=700", "kcoord-test") as disks,
    ):
        made.start()
        made.add_ranks()
        made.ask("before")
        for disk in disks:
            if fault == "full":
                fill(disk)
            elif fault == "read-only":
                subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=30)
            else:
                unmount(disk)
        for name in ("during-a", "during-b", "during-c"):
            _alone(made, name)
        for disk in disks:
            if fault == "full":
                (disk / "ballast").unlink()
            elif fault == "read-only":
                subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True, timeout=30)
        assert made.compiles("after") == 1
        for rank in made.ranks:
            rank.end()
        if fault == "vanished":  # what is mounted no more leaves an empty directory, which is no fault
            assert [rank.errors for rank in made.ranks] == [""] * len(made.ranks)
        else:
            told = [rank.errors.count({"full": "is full", "read-only": "read-only"}[fault]) for rank in made.ranks]
            assert max(told) in (1, 2), told
        for log in made.logs():
            assert "Traceback" not in log
            assert CANNOT not in log, "the store is well"


def test_a_local_directory_that_is_removed_in_mid_job_harms_nobody(tmp_path: Path) -> None:
    with cluster(tmp_path / "store") as made:
        made.start()
        made.add_ranks()
        made.ask("before")
        for node in made.nodes:
            for path in node.directory.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "started.log":
                    path.unlink()
        begun = time.monotonic()
        for name in ("during-a", "during-b"):
            _alone(made, name)
        assert time.monotonic() - begun < 60


_FETCHES = """
import sys
from pathlib import Path
from kcoord.artifacts.store import Store
assert (Store(Path(sys.argv[1])).fetch(sys.argv[2]) is None) == (sys.argv[3] == "missing")
"""


@pytest.mark.parametrize(
    ("kind", "size", "opens", "reads"), [("small", 20_000, 1, 2), ("large", 5 << 20, 1, 3), ("missing", 1, 4, 0)]
)
def test_a_fetch_asks_a_file_server_for_one_open_and_one_sequential_read(
    tmp_path: Path, interposer: Interposer, kind: str, size: int, opens: int, reads: int
) -> None:
    """A missing name: the file, its bucket, and the directory of that, which an NFS client may remember as it was."""
    store = Store(tmp_path / "store")
    store.open()
    files = {"kernel": os.urandom(size)}
    manifest = manifest_of(files)
    store.publish(manifest, files)
    calls = {call: interposer.stall(call, below=store.root, seconds=0) for call in ("open", "read", "stat", "mkdir")}
    digest = "f" * 64 if kind == "missing" else manifest.key.digest
    done = subprocess.run(
        [sys.executable, "-c", _FETCHES, str(store.root), digest, kind],
        env={**os.environ, **interposer.environ, "PYTHONPATH": str(Path(__file__).parents[2])}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0
    assert (calls["open"].hits, calls["read"].hits) == (opens, reads), (
        "a second read takes the rest of the first's page"
    )
    assert (calls["stat"].hits, calls["mkdir"].hits) == (0, 0)


def test_verify_names_what_the_disk_cannot_read_and_goes_on(tmp_path: Path, interposer: Interposer) -> None:
    store = Store(tmp_path / "store")
    store.open()
    digests = [publish(store, f"k{n}") for n in range(3)]
    bad = store.home(sorted(digests)[0])
    fault = interposer.fail("read", below=bad, error=errno.EIO)
    done = subprocess.run(
        [sys.executable, *KCOORD, "verify", "--json", "--store", str(store.root)],
        env={**os.environ, **interposer.environ}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert fault.hits
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert (list(told["bad"]), told["whole"]) == ([str(bad)], 2)
    assert "input/output error" in told["bad"][str(bad)]
