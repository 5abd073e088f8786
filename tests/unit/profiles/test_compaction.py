"""Old parts of a profile become one: nothing is lost, whoever reads, writes or signs meanwhile."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from kcoord.artifacts.signing import OFF, PROFILE, Trust
from kcoord.artifacts.store import Store
from kcoord.errors import StoreError
from kcoord.files import beneath
from kcoord.files.atomic import staging_name
from kcoord.files.reading import read_plain
from kcoord.files.trash import Trash
from kcoord.profiles import compaction
from kcoord.profiles.compaction import compact
from kcoord.profiles.parts import PARTS, parts, save_part
from kcoord.profiles.recipe import Recipe
from kcoord.telemetry.events import Notices
from tests.support.agents import Node, until
from tests.support.artifacts import DAY, older
from tests.support.cluster import start_agent
from tests.support.command import as_json, kcoord
from tests.support.sandbox import Sandbox

OURS = Trust("require", {"main": b"0" * 32})
NEW_KEY = Trust("require", {"new": b"1" * 32, **OURS.keys})
STRANGERS = Trust("require", {"theirs": b"2" * 32})


@pytest.fixture
def store(tmp_path: Path) -> Path:
    made = Store(tmp_path / "store")
    made.open()
    return made.root


def home(store: Path, name: str = "p") -> Path:
    return store / "v2" / "profiles" / name


def recipe(n: int, seconds: float = 1.0, order: int = 0) -> Recipe:
    return Recipe("test", "module", "kernel", (n,), "", seconds, order)


def many(store: Path, count: int = 40, trust: Trust = OFF, first: int = 0) -> list[Path]:
    """Parts of old jobs, each of other recipes and of one that all have."""
    made = [[recipe(-1, seconds=n), recipe(first + n, seconds=2.0, order=n)] for n in range(count)]
    return [older(save_part(home(store), recipes, trust=trust)) for recipes in made]


def read(store: Path, trust: Trust = OFF) -> dict[tuple[int, ...], Recipe]:
    notices = Notices()
    found = list(parts(home(store), notices, trust))
    return {r.call: replace(r, seconds=max(f.seconds for f in found if f.call == r.call)) for r in found}


def test_the_parts_of_old_jobs_become_one_that_holds_them_all(store: Path) -> None:
    gone = many(store)
    before = read(store)
    assert compact(store) == len(gone)
    assert len(PARTS.paths(home(store))) == 1
    assert read(store) == before
    assert before[(-1,)].seconds == 39, "the longest compile"
    assert len(list((store / "v2" / "trash").iterdir())) == len(gone), "a reader may have one open"
    assert compact(store) == 0


def test_few_parts_and_young_ones_stay(store: Path) -> None:
    few = many(store, 5)
    assert compact(store) == 0
    young = [save_part(home(store), [recipe(n)]) for n in range(100, 130)]
    assert compact(store) == len(few)
    assert set(young) < set(PARTS.paths(home(store)))


def test_a_pass_merges_only_so_many_and_the_next_ones_go_on(store: Path) -> None:
    many(store)
    before = read(store)
    assert compact(store, most=30) == 30
    while compact(store, most=30):
        for path in PARTS.paths(home(store)):
            older(path)
    assert len(PARTS.paths(home(store))) <= 16
    assert read(store) == before


def test_what_one_part_has_no_room_for_stays_in_its_own(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(store)
    before = read(store)
    monkeypatch.setattr("kcoord.profiles.recipe.MOST_RECIPES", 20)
    assert 10 < compact(store) < 40
    monkeypatch.undo()
    assert read(store) == before
    many(store, first=1000)
    before = read(store)
    monkeypatch.setattr(compaction, "_MOST_BYTES", 30 * recipe(1).size)
    assert 20 < compact(store) <= 40
    assert read(store) == before


def test_what_a_killed_writer_left_goes_after_a_day(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (mine,) = many(store, 1)
    left = home(store) / f".{staging_name()}"
    left.write_bytes(b"half a part")
    compact(store)
    assert left.exists(), "its writer may live"
    touched = beneath.touched
    monkeypatch.setattr(beneath, "touched", lambda directory, root: touched(directory, root) + 2 * DAY)
    compact(store)
    assert list(home(store).iterdir()) == [mine]


def test_what_cannot_be_read_stays_where_it_is(store: Path) -> None:
    many(store)
    torn, pipe = home(store) / f"{'a' * 64}.recipes", home(store) / f"{'b' * 64}.recipes"
    torn.write_bytes(b"torn")
    os.mkfifo(pipe)
    os.utime(pipe, (1e9, 1e9))
    link = home(store) / f"{'c' * 64}.recipes"
    link.symlink_to(older(torn))
    assert compact(store) == 40
    assert len(PARTS.paths(home(store))) == 4
    notices = Notices()
    assert len(list(parts(home(store), notices))) == 41
    assert len(notices.since(0)[0]) == 3


def test_a_part_that_only_another_user_may_read_stays_and_keeps_the_others_from_nothing(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = many(store)
    theirs = older(save_part(home(store), [recipe(99)]))

    def reading(path: Path, most: int) -> bytes:
        if path == theirs:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return read_plain(path, most)

    monkeypatch.setattr(compaction, "read_plain", reading)
    assert compact(store) == len(gone)
    assert theirs in PARTS.paths(home(store))
    assert len(PARTS.paths(home(store))) == 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_a_user_who_may_put_nothing_into_the_trash_adds_no_merged_part_each_time(sandbox: Sandbox) -> None:
    store = Store(sandbox.root / "store")
    store.open()
    before = {*many(store.root)}
    sandbox.root.chmod(0o755)
    for path in [store.root, *store.root.rglob("*")]:
        os.chown(path, 12345, 12345)
    (store.root / "v2" / "trash").mkdir(mode=0o755)
    code = f"""
import os
from pathlib import Path
from kcoord.profiles.compaction import compact
os.setgroups([]); os.setgid(12345); os.setuid(12345)
print(compact(Path({str(store.root)!r})))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
    assert {*PARTS.paths(home(store.root))} == before


# --- signatures ---


def test_with_a_key_what_it_verifies_becomes_one_signed_part_and_nothing_else_does(store: Path) -> None:
    ours, strangers, nobodys = (
        many(store, 20, OURS), many(store, 20, STRANGERS, first=100), many(store, 20, first=200)
    )  # fmt: skip
    assert compact(store, NEW_KEY) == len(ours)
    (merged,) = set(PARTS.paths(home(store))) - {*strangers, *nobodys}
    assert OURS.verifies(PROFILE, merged.read_bytes()), "the key that signed the many signs the one"
    assert {call for (call,) in read(store, NEW_KEY)} == {-1, *range(20)}


def test_what_a_key_signed_goes_when_that_key_is_taken_away_merged_or_not(store: Path) -> None:
    """It may have been stolen: nothing of it may live on under the new one's name."""
    many(store, 20, OURS)
    many(store, 30, NEW_KEY, first=100)
    assert compact(store, NEW_KEY) == 30, "one signer's at a time, the most"
    compact(store, NEW_KEY)
    new_alone = NEW_KEY.only(NEW_KEY.signer)
    assert {call for (call,) in read(store, NEW_KEY)} == {-1, *range(20), *range(100, 130)}
    assert {call for (call,) in read(store, new_alone)} == {-1, *range(100, 130)}
    same = [save_part(home(store), [recipe(1)], trust=key) for key in (new_alone, OURS)]
    assert same[0] != same[1], "equal recipes: neither takes the other's place"


def test_what_is_not_ours_to_merge_keeps_no_bounded_pass_from_the_rest(store: Path) -> None:
    many(store, 20, OURS)
    strangers = many(store, 20, STRANGERS, first=100)
    for _ in range(300):
        compact(store, OURS, most=8)
        left = [older(path) for path in PARTS.paths(home(store)) if path not in strangers]
        if len(left) == 1:
            break
    assert len(left) == 1
    assert {call for (call,) in read(store, OURS)} == {-1, *range(20)}


def test_without_a_key_signed_parts_are_left_alone(store: Path) -> None:
    signed, nobodys = many(store, 20, OURS), many(store, 20)
    assert not {*signed} & {*nobodys}, "equal recipes, and an unsigned part does not take a signed one's place"
    assert compact(store, Trust("require")) == 0, "of use to nobody, and nobody's to merge"
    assert compact(store) == len(nobodys)
    assert all(OURS.verifies(PROFILE, path.read_bytes()) for path in signed)
    assert read(store, OURS) == {call: r for call, r in read(store).items() if call[0] < 20}


def test_of_equal_parts_with_and_without_a_key_the_signed_one_stays_signed(store: Path) -> None:
    signed = save_part(home(store), [recipe(1)], trust=OURS)
    save_part(home(store), [recipe(1)])
    assert OURS.verifies(PROFILE, signed.read_bytes())
    assert list(parts(home(store), Notices(), OURS)) == [recipe(1)]


# --- others at the same time ---


def test_two_that_merge_at_once_lose_nothing(store: Path) -> None:
    for _ in range(5):
        many(store)
        before = read(store)
        threads = [threading.Thread(target=compact, args=(store,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            assert read(store).keys() == before.keys()
        assert read(store) == before


def test_one_that_is_killed_before_the_parts_go_has_done_no_harm(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    many(store)
    before = read(store)

    def full(trash: Trash, path: Path) -> Path | None:
        raise OSError(28, "full")

    monkeypatch.setattr(Trash, "take", full)
    with pytest.raises(StoreError):
        compact(store)
    monkeypatch.undo()
    assert len(PARTS.paths(home(store))) == 41
    assert read(store) == before
    for path in PARTS.paths(home(store)):
        older(path)
    assert compact(store) == 40
    assert read(store) == before


def test_a_reader_from_under_whose_hands_a_part_goes_looks_again(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS v3 what another host deletes is ESTALE to whoever reads it."""
    many(store)
    before, notices, stale = read(store), Notices(), []

    def reading(path: Path, most: int, **how: bool) -> bytes:
        if len(stale) < 3:
            stale.append(path)
            raise OSError(errno.ESTALE, "Stale file handle", str(path))
        return read_plain(path, most, **how)

    monkeypatch.setattr("kcoord.profiles.profile_files.read_plain", reading)
    assert {r.call for r in parts(home(store), notices)} == before.keys()
    assert notices.since(0)[0] == []


def test_a_writer_that_goes_on_loses_nothing(store: Path) -> None:
    gone = many(store)
    mine = older(save_part(home(store), [recipe(500)]))
    compact(store)
    assert not mine.exists()
    save_part(home(store), [recipe(500), recipe(501)], earlier=mine)
    assert {(-1,), (500,), (501,)} < read(store).keys()
    assert len(PARTS.paths(home(store))) == 2 < len(gone)


# --- who does it ---


def test_agents_merge_old_parts_though_no_bound_is_set(store: Path) -> None:
    many(store)
    with Node(store=str(store)) as node:
        start_agent(node, "import kcoord.agent.chores.store_retention as retention\nretention.FIRST = 0.0\n")
        until(lambda: len(PARTS.paths(home(store))) == 1)


def test_gc_merges_old_parts_and_a_dry_run_does_not(sandbox: Sandbox) -> None:
    store = Store(sandbox.root / "store")
    store.open()
    many(store.root)
    settings = {"KCOORD_STORE": str(store.root)}
    kcoord(sandbox, "gc", "--dry-run", **settings)
    assert len(PARTS.paths(home(store.root))) == 40
    told = kcoord(sandbox, "gc", KCOORD_SIGNING_KEY="nonsense", **settings)
    assert "parts of profiles are not merged: KCOORD_SIGNING_KEY: it must be ID:SECRET" in told.stderr
    assert kcoord(sandbox, "gc", KCOORD_TRUST="require", **settings).stderr == ""
    assert len(PARTS.paths(home(store.root))) == 40
    assert as_json(sandbox, "gc", **settings)["tidied"] == {"parts of profiles, merged": 40}
    assert len(PARTS.paths(home(store.root))) == 1
