"""Sweeping: what dead writers left goes, and nothing of a living one does."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.artifacts import local
from kcoord.artifacts.describe import describe
from kcoord.artifacts.manifest import MANIFEST_NAME
from kcoord.errors import StoreError
from kcoord.files import beneath
from kcoord.files.atomic import place, staging_name
from kcoord.files.rename import rename_into_place
from kcoord.files.sweep import lives, sweep
from kcoord.testing.stores import KEY
from tests.support.agents import Node, stage, until
from tests.support.artifacts import ORIGIN
from tests.support.cluster import start_agent
from tests.support.mounts import mounted, read_only

HOST = os.uname().nodename


@pytest.fixture
def dead() -> int:
    """The pid of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


@pytest.fixture
def alive() -> Iterator[int]:
    """The pid of another process, which lives."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        yield process.pid
    finally:
        process.communicate()


def name(pid: int, host: str = HOST, where: str | None = None, suffix: str = "") -> str:
    return f"{host}-{pid}-{place() if where is None else where}0123456789ab{suffix}"


def make(staging: Path, called: str) -> Path:
    made = staging / called
    (made / "deeper").mkdir(parents=True)
    (made / "deeper" / "kernel.cubin").write_bytes(b"half a kern")
    return made


def sweep_all(staging: Path) -> int:
    """As if all that is there were years old."""
    return sweep(staging, here_after=-1, elsewhere_after=-1)


def test_what_a_dead_process_of_this_host_left_goes_when_it_is_old(tmp_path: Path, dead: int) -> None:
    left = make(tmp_path, name(dead))
    assert sweep(tmp_path) == 0, "it may be a pid of a moment ago"
    assert left.exists()
    assert sweep(tmp_path, here_after=-1) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("suffix", ["", "-own", ".swept"])
def test_what_a_living_process_stages_stays_however_old_it_is(tmp_path: Path, alive: int, suffix: str) -> None:
    mine, theirs = make(tmp_path, f"{staging_name()}{suffix}"), make(tmp_path, name(alive, suffix=suffix))
    assert sweep(tmp_path, here_after=-1, elsewhere_after=-1) == 0
    assert mine.exists()
    assert theirs.exists()


def test_a_process_of_another_user_lives() -> None:
    assert lives(1)


@pytest.mark.parametrize(
    ("host", "where"),
    [("another", None), (HOST, "0a1b2c3d"), (HOST, "")],
    ids=["another host", "another container of this name, or an earlier boot", "an earlier version"],
)
def test_what_others_left_goes_after_a_day_whatever_their_pid_means_here(
    tmp_path: Path, dead: int, alive: int, host: str, where: str | None
) -> None:
    make(tmp_path, name(dead, host, where))
    make(tmp_path, name(alive, host, where).replace("0123", "4567"))
    assert sweep(tmp_path, here_after=-1) == 0
    assert len(list(tmp_path.iterdir())) == 2
    assert sweep_all(tmp_path) == 2


@pytest.mark.parametrize("suffix", [".part", ".probe", ".spans"])
def test_files_beside_staging_directories_go_likewise(tmp_path: Path, dead: int, suffix: str) -> None:
    (tmp_path / name(dead, suffix=suffix)).write_bytes(b"half")
    assert sweep_all(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []


def test_names_that_we_do_not_know_are_left_alone(tmp_path: Path, dead: int) -> None:
    names = [
        "mine",
        "host-12",
        ".nfs0000000000a1b2c3",
        name(dead, suffix=".tmp"),
        f"x{name(dead)}y",
        f"{HOST}-0-{'a' * 12}",
    ]
    for each in names:
        make(tmp_path, each)
    assert sweep_all(tmp_path) == 0
    assert len(list(tmp_path.iterdir())) == len(names)


def test_no_link_is_followed(tmp_path: Path, dead: int) -> None:
    precious = make(tmp_path, "precious")
    staging = tmp_path / "staging"
    staging.mkdir()
    (staging / name(dead)).symlink_to(precious)
    inside = make(staging, name(dead, suffix=".part"))
    (inside / "link").symlink_to(precious)
    assert sweep_all(staging) == 2
    assert list(staging.iterdir()) == []
    assert (precious / "deeper" / "kernel.cubin").exists()
    (tmp_path / "linked").symlink_to(staging)
    make(staging, name(dead))
    assert sweep_all(tmp_path / "linked") == 0, "whoever made the link would choose where we remove"


def test_many_sweepers_at_once_remove_everything_once(tmp_path: Path, dead: int) -> None:
    for number in range(100):
        make(tmp_path, f"{HOST}-{dead}-{place()}{number:012x}")
    make(tmp_path, staging_name())
    removed: list[int] = []
    barrier = threading.Barrier(8)

    def work() -> None:
        barrier.wait()
        removed.append(sweep_all(tmp_path))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(removed) == 100
    assert len(list(tmp_path.iterdir())) == 1


def test_one_call_does_a_bounded_amount_of_work(tmp_path: Path, dead: int) -> None:
    for number in range(250):
        (tmp_path / f"{HOST}-{dead}-{place()}{number:012x}").mkdir()
    assert sweep_all(tmp_path) == 200
    assert sweep_all(tmp_path) == 50
    assert sweep_all(tmp_path) == 0


def test_a_directory_that_is_not_there_has_nothing_stale(tmp_path: Path) -> None:
    assert sweep(tmp_path / "missing") == 0


def test_an_owner_that_lives_after_all_cannot_publish_what_is_half_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer of another host that took more than a day, and is done in this very moment."""
    home = tmp_path / "home"
    late = stage(home).rename(tmp_path / ".kcoord" / "staging" / name(7, "another"))
    (late / MANIFEST_NAME).write_bytes(describe(late, KEY, 1.0, ORIGIN).encoded)
    tried = []

    def remove(path: Path, root: Path) -> bool:
        (path / "kernel.txt").unlink()
        with pytest.raises(StoreError):
            rename_into_place(late, home, lambda _: True, local.quarantine_of(home))
        tried.append(path)
        return True

    monkeypatch.setattr(beneath, "remove", remove)
    assert sweep_all(late.parent) == 1
    assert tried
    assert not home.exists()


def test_on_a_disk_that_cannot_be_written_nothing_goes(tmp_path: Path, dead: int) -> None:
    with mounted(tmp_path / "disk", "--bind", str(make(tmp_path, "there"))) as disk:
        make(disk, name(dead))
        read_only(disk)
        with pytest.raises(OSError, match="Read-only"):
            sweep_all(disk)
        assert (disk / name(dead)).exists()


# --- by the agent ---


_AT_ONCE = """
import kcoord.agent.chores.sweeping as sweeper
sweeper.FIRST_IN_STORE = 0.0
sweeper.sweep.__kwdefaults__.update(here_after=-1, elsewhere_after=-1)
"""


_KILLED = """
import os, pathlib, signal, sys
pathlib.Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
from kcoord.keys.tools.machine_cache import keep
keep(pathlib.Path(sys.argv[1]), "entry", 1)
"""


def test_what_a_process_was_writing_into_the_machines_cache_when_it_was_killed_is_removed(tmp_path: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", _KILLED, tmp_path], timeout=60)
    assert ended.returncode == -signal.SIGKILL
    (left,) = (tmp_path / "toolchain").iterdir()
    assert sweep_all(tmp_path / "toolchain") == 1
    assert not left.exists()


def test_an_agent_sweeps_the_store_and_the_local_tiers_that_it_sees(tmp_path: Path, dead: int) -> None:
    with Node(store=str(tmp_path)) as node:
        in_store = make(tmp_path / "v2" / "staging", name(dead, "another"))
        kept = make(tmp_path / "v2" / "staging", "something else")
        left = [
            make(node.directory / "objects" / "ab" / ".kcoord" / "staging", name(dead)),
            make(node.directory / "triton" / ".kcoord" / "staging", name(dead)),
            make(node.directory / "toolchain", f"{name(dead)}.part"),
        ]
        start_agent(node, _AT_ONCE)
        until(lambda: not in_store.exists() and not any(path.exists() for path in left))
        assert kept.exists()
        assert (tmp_path / "v2" / "swept").exists()
        again = make(tmp_path / "v2" / "staging", name(dead, "another"))
        with Node(store=str(tmp_path)) as second:
            left_there = make(second.directory / "triton" / ".kcoord" / "staging", name(dead))
            start_agent(second, _AT_ONCE)
            until(lambda: not left_there.exists())
        assert again.exists(), "the store was swept a moment ago, and a thousand nodes start at once"
        shutil.rmtree(again)
