"""Old files of what a profile needs become one: nothing is forgotten, whoever reads and writes meanwhile."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.files.reading import read_plain
from kcoord.files.shared_directory import written_at
from kcoord.files.trash import Trash
from kcoord.profiles import compaction
from kcoord.profiles.compaction import compact_requested
from kcoord.profiles.requested import (
    REQUESTED,
    RequestedArtifact,
    all_requested,
    load_requested,
    requested_directory,
    save_requested,
)
from kcoord.retention.pinned import pin_profile, pinned_digests
from tests.support.agents import Node, until
from tests.support.artifacts import DAY, older
from tests.support.cluster import start_agent
from tests.support.command import as_json
from tests.support.sandbox import Sandbox


@pytest.fixture
def store(tmp_path: Path) -> Path:
    made = Store(tmp_path / "store")
    made.open()
    return made.root


def need(n: int) -> RequestedArtifact:
    return RequestedArtifact(f"{n:064x}", f"triton/{n}")


def note(store: Path, numbers: list[int], age: float = DAY) -> Path:
    return older(save_requested(requested_directory(store, "p"), [need(n) for n in numbers]), age)


def many_needs(store: Path, count: int = 40, first: int = 1) -> list[Path]:
    """Files of old jobs, the last one the newest, each of other needs and of one that all have."""
    return [note(store, [first + n, 0], DAY * (count - n)) for n in range(count)]


def test_the_needs_of_old_jobs_become_one_file_in_the_same_order(store: Path) -> None:
    gone, directory = many_needs(store), requested_directory(store, "p")
    before = load_requested(directory)
    assert before[:4] == [need(40), need(0), need(39), need(38)]
    newest = written_at(gone[-1])
    assert compact_requested(store) == len(gone)
    assert load_requested(directory) == before
    assert [written_at(path) for path in REQUESTED.paths(directory)] == [pytest.approx(newest, abs=1e-3)]
    assert len(list((store / "v2" / "trash").iterdir())) == len(gone), "a reader may have one open"
    assert compact_requested(store) == 0


def test_young_files_of_needs_stay_and_are_the_newest_still(store: Path) -> None:
    gone, directory = many_needs(store, 16), requested_directory(store, "p")
    assert compact_requested(store) == 0, "few"
    young = [note(store, [n], age=100.0 - n) for n in range(50, 53)]
    before = load_requested(directory)
    assert before[:3] == [need(52), need(51), need(50)]
    assert compact_requested(store) == len(gone)
    assert load_requested(directory) == before
    assert set(young) < set(REQUESTED.paths(directory))


def test_a_young_job_that_needs_just_what_all_old_ones_did_keeps_its_file(store: Path) -> None:
    gone = many_needs(store, 20)
    young = note(store, [5, *range(20, 5, -1), *range(5)], age=1.0)
    at, before = young.stat().st_mtime_ns, load_requested(young.parent)
    assert compact_requested(store) == len(gone)
    assert REQUESTED.paths(young.parent) == [young]
    assert young.stat().st_mtime_ns == at
    assert load_requested(young.parent) == before


def test_needs_that_have_no_room_in_one_file_stay_in_theirs(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_needs(store)
    directory = requested_directory(store, "p")
    before = all_requested(directory)
    monkeypatch.setattr(compaction, "MOST_REQUESTED", 30)
    assert compact_requested(store) == 29
    (full,) = [path for path in REQUESTED.paths(directory) if path.stat().st_size > 1000]
    for path in many_needs(store, 10, first=100):
        older(path, 60 * DAY)
    before |= {need(n) for n in range(100, 110)}
    assert compact_requested(store) == 21, "a full one is in nobody's way"
    assert full.exists()
    assert len(REQUESTED.paths(directory)) == 2
    assert all_requested(directory) == before


def test_a_file_of_needs_that_is_torn_or_not_named_after_what_is_in_it_stays(store: Path) -> None:
    gone, directory = many_needs(store), requested_directory(store, "p")
    content = note(store, [7, 8]).read_bytes()
    foreign, torn, pipe = (directory / f"{letter * 64}.needs" for letter in "abc")
    foreign.write_bytes(content)  # its writer may put there what is in no other file
    torn.write_bytes(content[:-1])
    os.mkfifo(pipe)
    for path in (foreign, torn, pipe):
        os.utime(path, (1e9, 1e9))
    assert compact_requested(store) == len(gone) + 1
    assert {foreign, torn, pipe} < set(REQUESTED.paths(directory))
    assert len(REQUESTED.paths(directory)) == 4
    with pytest.raises(StoreError, match="cannot be read"):
        all_requested(directory)


def test_what_is_needed_is_merged_before_the_old_files_go(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many_needs(store)
    before = load_requested(requested_directory(store, "p"))

    def full(trash: Trash, path: Path) -> Path | None:
        raise OSError(28, "full")

    monkeypatch.setattr(Trash, "take", full)
    with pytest.raises(StoreError):
        compact_requested(store)
    monkeypatch.undo()
    assert len(REQUESTED.paths(requested_directory(store, "p"))) == 41
    assert load_requested(requested_directory(store, "p")) == before
    assert compact_requested(store) == 40
    assert load_requested(requested_directory(store, "p")) == before


@pytest.mark.parametrize("error", [errno.ENOENT, errno.ESTALE])
def test_a_reader_of_needs_from_under_whose_hands_a_file_goes_looks_again(
    store: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    many_needs(store)
    directory = requested_directory(store, "p")
    before = load_requested(directory)
    for read in (lambda: set(load_requested(directory)), lambda: all_requested(directory)):
        missed: list[Path] = []

        def reading(path: Path, most: int, missed: list[Path] = missed) -> bytes:
            if len(missed) < 3:
                missed.append(path)
                raise OSError(error, os.strerror(error), str(path))
            return read_plain(path, most)

        monkeypatch.setattr("kcoord.profiles.profile_files.read_plain", reading)
        assert read() == set(before)
        assert len(missed) == 3


def test_a_writer_of_needs_that_goes_on_loses_nothing(store: Path) -> None:
    many_needs(store)
    mine = note(store, [500])
    compact_requested(store)
    assert not mine.exists()
    save_requested(mine.parent, [need(500), need(501)], earlier=mine)
    assert {need(0), need(1), need(500), need(501)} < all_requested(mine.parent)
    assert len(REQUESTED.paths(mine.parent)) == 2


_PASSES = """
import sys
from pathlib import Path
from kcoord.profiles import compaction
compaction._ABOVE, compaction._SETTLED = 1, -1.0  # all there is, as soon as it is there
store, removed = Path(sys.argv[1]), 0
print("begun", flush=True)
while not (store / "enough").exists():
    removed += compaction.compact_requested(store)
print(removed)
"""


def test_passes_of_two_processes_lose_no_need_beside_writers_and_readers(store: Path) -> None:
    """Each writer replaces its own file by a larger one, under names that the other and the passes use, too."""
    directory = requested_directory(store, "p")
    saved: set[RequestedArtifact] = set()

    def write(number: int) -> None:
        mine, file = [], None
        for n in range(60):
            mine.append(need(n if n % 3 else 1000 * number + n))
            file = save_requested(directory, mine, file)
            saved.update(mine)
            if n % 20 == 19:
                mine, file = [], None  # another job begins

    passes = [
        subprocess.Popen([sys.executable, "-c", _PASSES, str(store)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    writers = [threading.Thread(target=write, args=(number,)) for number in (1, 2, 3)]
    try:
        assert [process.stdout.readline() for process in passes if process.stdout] == ["begun\n"] * 2
        for writer in writers:
            writer.start()
        while any(writer.is_alive() for writer in writers):
            before = set(saved)
            try:
                assert before <= all_requested(directory)
            except StoreError as error:
                if "changes all the time" not in str(error):
                    raise
    finally:
        (store / "enough").touch()
        for writer in writers:
            writer.join()
        said = [process.communicate(timeout=60)[0] for process in passes]
    assert all(process.returncode == 0 and int(out) > 0 for process, out in zip(passes, said, strict=True))
    assert all_requested(directory) == set(load_requested(directory)) == saved


# --- who does it ---


def test_agents_merge_old_files_of_needs_too(store: Path) -> None:
    many_needs(store)
    with Node(store=str(store)) as node:
        start_agent(node, "import kcoord.agent.chores.store_retention as retention\nretention.FIRST = 0.0\n")
        until(lambda: len(REQUESTED.paths(requested_directory(store, "p"))) == 1)


def test_gc_goes_on_though_more_files_were_left_of_a_pinned_profile_than_are_read(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(sandbox.root / "store")
    store.open()
    note(store.root, [0])
    pin_profile(store.root, "p")
    with monkeypatch.context() as fast:
        fast.setattr(os, "fsync", lambda descriptor: None)
        many_needs(store.root, 4096)
    with pytest.raises(StoreError, match="4,097 files are too many: run 'kcoord gc'"):
        pinned_digests(store.root)
    done = as_json(sandbox, "gc", "--max-size", "0", KCOORD_STORE=str(store.root))
    assert done["tidied"] == {"lists of needs, merged": 4097}
    assert pinned_digests(store.root) == {need(n).digest for n in range(4097)}
