"""Retention: what the limits cost goes, by way of the trash; what is pinned, young or in use stays."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import shutil
import time
from pathlib import Path

import msgpack
import pytest

from kcoord.agent.chores import retention
from kcoord.agent.chores.retention import Holdings, LocalRetention, StoreRetention
from kcoord.agent.expectations import Expectations
from kcoord.agent.packs import UsedArtifacts
from kcoord.agent.tiers import Tiers
from kcoord.artifacts import local
from kcoord.artifacts.store import Store
from kcoord.artifacts.store_root import MARKER
from kcoord.errors import StoreError
from kcoord.files.trash import Trash
from kcoord.leases.local import LocalLeases
from kcoord.packs.exchange import export
from kcoord.packs.pack import Pack, look_at_pack
from kcoord.packs.pack_files import pack_name, packs_of
from kcoord.rank.client import Ready
from kcoord.retention.limits import Collected, Entry, Limits, choose
from kcoord.retention.local_collector import collect_local, keeps_access_times
from kcoord.retention.pins import kept_by_pins, pin, pinned_profiles, unpin
from kcoord.retention.store_collector import collect
from kcoord.retention.tidying import Tidying
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from kcoord.units import bytes_text, parse_bytes, parse_span, span_text
from tests.support.agents import Node, until
from tests.support.artifacts import DAY, make_home, older, publish
from tests.support.cluster import start_agent
from tests.support.command import as_json, kcoord
from tests.support.mounts import mounted, read_only, tmpfs
from tests.support.packs import pack, uses
from tests.support.sandbox import Sandbox
from tests.support.signing import OURS, trust

AT_ONCE = Tidying(grace=-1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.open()
    return made


def used(store: Store, ago: float, digest: str) -> None:
    """It was used so long ago."""
    store.touch(digest)
    older(store.home(digest), ago)


def run(store: Store, dry_run: bool = False, least_age: float = 0.0, **limits: float) -> Collected:
    chosen = Limits(**limits, least_age=least_age)  # type: ignore[arg-type]
    return collect(store.root, chosen, pinned=kept_by_pins(store.root, store.trust).names, dry_run=dry_run)


def there(store: Store, *digests: str) -> list[bool]:
    return [store.fetch(digest) is not None for digest in digests]


def names(found: Collected) -> list[str]:
    return [d.entry.name for d in found.removed]


# --- which ---


def entry(name: str, used: float, size: int = 100) -> Entry:
    return Entry(name, size, 3, used, used)


def test_what_was_used_longest_ago_goes_first_and_no_more_than_needed() -> None:
    entries = [entry("a", 3), entry("b", 1), entry("c", 2), entry("d", 4)]
    plan = choose(entries, Limits(max_size=250, least_age=0), now=100)
    assert [d.entry.name for d in plan.doomed] == ["b", "c"]
    assert plan.over == ""
    assert choose(entries, Limits(max_size=400, least_age=0), now=100).doomed == []
    assert len(choose(entries, Limits(max_files=9, least_age=0), now=100).doomed) == 1


def test_pinned_and_young_artifacts_stay_and_it_is_said_that_the_limit_is_not_kept() -> None:
    entries = [entry("pinned", 1), entry("young", 99), entry("old", 2)]
    plan = choose(entries, Limits(max_size=0, least_age=10), now=100, pinned={"pinned"})
    assert [d.entry.name for d in plan.doomed] == ["old"]
    assert plan.over.startswith("200 bytes more than allowed")


def test_what_the_other_limits_cost_counts_for_the_size_too() -> None:
    entries = [entry("unused", 1), entry("b", 90), entry("c", 91)]
    plan = choose(entries, Limits(max_size=200, unused_for=50, least_age=0), now=100)
    assert [(d.entry.name, d.rule) for d in plan.doomed] == [("unused", "unused-for")]


def test_sizes_and_times_are_read_as_people_write_them() -> None:
    assert [parse_bytes(t) for t in ("50GiB", "50G", "1.5 kb", "7")] == [50 << 30, 50 << 30, 1500, 7]
    assert [parse_span(t) for t in ("30d", "12h", "15 min", "45s", "2w", "0")] == [
        30 * DAY,
        43200,
        900,
        45,
        14 * DAY,
        0,
    ]
    for parse, text in (
        (parse_bytes, "x"),
        (parse_bytes, "-1"),
        (parse_bytes, "9" * 30),
        (parse_span, "30"),
        (parse_span, "1y"),
    ):
        with pytest.raises(ValueError, match="such as"):
            parse(text)
    assert [bytes_text(1536), span_text(3 * DAY)] == ["1.5 KiB", "3 d"]


# --- the store ---


def test_what_is_unused_goes_and_what_was_used_lately_stays_however_old_it_is(store: Store) -> None:
    old, loved, young = publish(store, "old", 40 * DAY), publish(store, "loved", 40 * DAY), publish(store, "young")
    used(store, 2 * DAY, loved)
    found = run(store, unused_for=30 * DAY)
    assert names(found) == [old]
    assert found.removed[0].why == "unused for 40 d"
    assert there(store, old, loved, young) == [False, True, True]


def listing(root: Path) -> dict[str, tuple[int, int, int]]:
    """All that lies below `root`, and when it was changed, to the nanosecond."""
    found = {path: path.lstat() for path in [root, *root.rglob("*")]}
    return {str(path): (f.st_mtime_ns, f.st_ctime_ns, f.st_ino) for path, f in found.items()}


def test_a_dry_run_writes_nothing_and_needs_no_right_to(sandbox: Sandbox, tmp_path: Path) -> None:
    with tmpfs(tmp_path / "disk", "4m") as disk:
        store = Store(disk / "store")
        store.open()
        digests = [publish(store, f"k{n}", (n + 1) * DAY) for n in range(3)]
        pack(store, digests[1:], "llama")
        pin(store.root, "llama")
        (store.root / "v2" / "trash").mkdir()
        (store.root / "v2" / "trash" / "old").touch()
        make_home(disk / "local", "k", 9 * DAY)
        limits = ["gc", "--max-size", "0", "--least-age", "0", "--grace", "0", "--dry-run", "--json"]
        settings = {"KCOORD_STORE": str(store.root), "KCOORD_LOCAL_DIR": str(disk / "local")}

        def looked() -> tuple[list[str], int, int]:
            told = json.loads(kcoord(sandbox, *limits, **settings).stdout)
            here = json.loads(kcoord(sandbox, *limits, "--local", **settings).stdout)
            return [d["artifact"] for d in told["removed"]], told["pinned"], len(here["removed"])

        before = listing(disk)
        assert looked() == ([digests[0]], 2, 1)
        assert listing(disk) == before
        read_only(disk)
        assert looked() == ([digests[0]], 2, 1)


def test_what_is_removed_is_deleted_after_its_grace_period(store: Store) -> None:
    digest = publish(store, "k")
    run(store, max_size=0)
    (trashed,) = (store.root / "v2" / "trash").iterdir()
    assert trashed.name.startswith(digest)
    run(store)
    assert trashed.exists(), "a reader may have it open"
    collect(store.root, Limits(), tidying=AT_ONCE)
    assert not trashed.exists()


def test_a_directory_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "v2" / "objects" / "ab" / ("ab" * 32)).mkdir(parents=True)
    with pytest.raises(StoreError, match="there is no store here"):
        collect(tmp_path, Limits(max_size=0, least_age=0))
    assert (tmp_path / "v2" / "objects" / "ab" / ("ab" * 32)).exists()


def test_a_store_of_a_later_format_is_left_alone_by_every_command(sandbox: Sandbox, store: Store) -> None:
    """What its own version keeps, and where, is not known here."""
    digest = publish(store, "k", 90 * DAY)
    export(store, uses([digest]), {}, sandbox.root / "b.kcb")
    (store.root / MARKER).write_bytes(msgpack.packb({"format": 2, "uuid": "x"}))
    before = listing(store.root)
    commands = ["gc --max-size 0", "gc --max-size 0 --dry-run", "gc --pins", "ls", "verify", "explain k", "export --all a.kcb",
                "import b.kcb"]  # fmt: skip
    for command in commands:
        told = kcoord(sandbox, *command.split(), code=1, KCOORD_STORE=str(store.root))
        assert told.stdout == "", command
        assert (
            told.stderr
            == f"kcoord: {store.root}: its format is not 1: use the kcoord that made it, or a new directory\n"
        )
    assert listing(store.root) == before


_AS_ANOTHER = """
import os, sys
import kcoord.cli, kcoord.cli.gc
os.setgroups([]); os.setgid(12345); os.setuid(12345)
kcoord.cli.main()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root becomes another user")
def test_gc_fails_and_says_so_where_this_user_may_not_remove_what_the_limits_cost(sandbox: Sandbox) -> None:
    """A user of the team published without umask 002."""
    store = Store(sandbox.root / "store")
    store.open()
    theirs, ours = publish(store, "theirs", DAY), publish(store, "ours", DAY)
    sandbox.root.chmod(0o755)
    (store.root / "v2" / "trash").mkdir()
    for path in [store.root, *store.root.rglob("*")]:
        os.chown(path, 12345, 12345)
    os.chown(store.home(theirs).parent, 0, 0)
    store.home(theirs).parent.chmod(0o755)
    done = sandbox.run("-c", _AS_ANOTHER, "gc", "--max-size", "0", "--json", KCOORD_STORE=str(store.root))
    assert done.returncode == 1, done.stderr
    told = json.loads(done.stdout)
    assert ([d["artifact"] for d in told["removed"]], told["refused"]) == ([ours], 1)
    assert done.stderr.startswith("kcoord: this user may not remove 1 of the artifacts that were to go: ")


def test_names_that_are_no_digests_are_left_alone(store: Store) -> None:
    odd = [store.root / "v2" / "objects" / name for name in ("ab/mine", "notes", "ab/.nfs0001")]
    for path in odd:
        path.mkdir(parents=True)
    publish(store, "k")
    assert len(run(store, max_size=0).removed) == 1
    assert all(path.exists() for path in odd)


def test_a_link_in_the_trash_is_removed_and_not_followed(store: Store, tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_text("x")
    trash = store.root / "v2" / "trash"
    trash.mkdir()
    (trash / "link").symlink_to(tmp_path / "precious")
    assert Trash(trash).empty(-1) == 1
    assert (tmp_path / "precious" / "file").exists()
    (tmp_path / "linked").symlink_to(tmp_path / "precious")
    assert Trash(tmp_path / "linked").empty(-1) == 0
    assert (tmp_path / "precious" / "file").exists()


def test_what_is_no_artifact_goes_by_its_own_age(store: Store) -> None:
    v2 = store.root / "v2"
    month = [v2 / "traces" / "job" / "a.spans", v2 / "leases" / "ab" / ("ab" * 32 + ".outcome"),
             v2 / "leases" / "ab" / ("cd" * 32 + ".lease"), v2 / "leases" / "ab" / "host-1-abc.part"]  # fmt: skip
    fresh = [path.with_name(f"{'ef' * 32}{path.suffix}") for path in month]
    for path in (*month, *fresh):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    for path in month:
        os.utime(path, (1e9, 1e9))
    for n in range(5):
        (v2 / "quarantine" / f"q{n}").mkdir(parents=True)
    found = collect(store.root, Limits(), tidying=Tidying(quarantined=2))
    assert found.tidied == {"traces": 1, "outcomes of leases": 3, "quarantined": 3}
    assert not any(path.exists() for path in month)
    assert all(path.exists() for path in fresh)
    assert len(list((v2 / "quarantine").iterdir())) == 2
    assert len(list((v2 / "trash").iterdir())) == 3


# --- last use ---


def test_an_artifact_is_touched_once_a_day_and_by_whoever_may(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = publish(store, "k", 40 * DAY)
    home = store.home(digest)
    store.touch(digest)
    first = home.stat().st_mtime_ns
    assert run(store, unused_for=DAY).removed == []
    store.touch(digest)
    assert home.stat().st_mtime_ns == first, "it costs no write a second time"
    store.touch("ab" * 32)  # it is gone

    def refused(*given: object) -> None:
        raise PermissionError(errno.EPERM, "another user's")

    older(home, 2 * DAY)
    monkeypatch.setattr("kcoord.files.beneath.touch", refused)
    store.touch(digest)


# --- pins ---


def test_what_a_pinned_profiles_jobs_used_stays_and_so_does_its_pack(store: Store) -> None:
    first, later, other = (publish(store, name, 90 * DAY) for name in ("first", "later", "other"))
    pin(store.root, "llama")
    assert kept_by_pins(store.root, store.trust).digests == set(), "no job has run yet"
    pack(store, [first, later], "llama", ago=80)
    older(packs_of(store.root, "llama")[0], 80 * DAY)
    assert names(run(store, max_size=0)) == [other]
    assert there(store, first, later) == [True, True]
    assert pinned_profiles(store.root) == ["llama"]
    assert unpin(store.root, "llama")
    assert len(run(store, max_size=0).removed) == 3


@pytest.mark.parametrize("broken", ["pins", "pack"])
def test_while_it_is_unknown_what_is_pinned_nothing_is_removed(store: Store, broken: str) -> None:
    digest = publish(store, "k", DAY)
    pack(store, [digest], "llama")
    pin(store.root, "llama")
    if broken == "pack":
        (path,) = packs_of(store.root, "llama")
        path.write_bytes(path.read_bytes()[:-1])
    else:
        shutil.rmtree(store.root / "v2" / "pins")
        (store.root / "v2" / "pins").touch()
    with pytest.raises(StoreError, match=r"was cut.* is pinned|part of its path is a file"):
        run(store, max_size=0)
    assert there(store, digest) == [True]


def test_where_signatures_are_required_strangers_packs_pin_nothing(store: Store) -> None:
    digest = publish(store, "k", DAY)
    pack(store, [digest], "llama")
    pin(store.root, "llama")
    assert kept_by_pins(store.root, trust(OURS)).digests == set()
    (path,) = packs_of(store.root, "llama")
    path.rename(path.with_name(pack_name(1, "0" * 64, "main")))
    with pytest.raises(StoreError, match="not signed"):
        kept_by_pins(store.root, trust(OURS))


def test_a_pack_that_is_replaced_while_the_pins_are_read_is_looked_for_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [publish(store, f"k{n}") for n in range(2)]
    pack(store, digests[:1], "llama")
    pin(store.root, "llama")
    replaced: list[object] = []

    def look(opened: Store, path: Path) -> Pack:
        if not replaced:
            replaced.append(pack(store, digests, "llama"))
        return look_at_pack(opened, path)

    monkeypatch.setattr("kcoord.retention.pins.look_at_pack", look)
    assert kept_by_pins(store.root, store.trust).digests == set(digests)


# --- this node's own copies ---


@pytest.fixture
def local_dir(tmp_path: Path) -> Path:
    if not keeps_access_times(tmp_path):
        pytest.skip("the temporary directory's file system keeps no access times")
    return tmp_path / "local"


def test_on_a_node_what_was_read_within_a_day_stays(local_dir: Path) -> None:
    stale, idle = make_home(local_dir, "stale", 9 * DAY), make_home(local_dir, "idle", 0.9 * DAY)
    read = make_home(local_dir, "read", 9 * DAY)
    assert local.open_artifact(read) is not None, (
        "a rank loads it: its manifest's access time changes, and nothing else"
    )
    found = collect_local(local_dir, Limits(max_size=0, least_age=0))
    assert names(found) == [str(stale)]
    assert not stale.exists()
    assert idle.exists()
    assert read.exists()
    assert "in use" in found.over
    (trashed,) = (stale.parent / ".kcoord" / "trash").iterdir()
    collect_local(local_dir, Limits(), tidying=AT_ONCE)
    assert not trashed.exists()


def test_what_a_compiler_without_kcoord_reads_in_its_own_cache_stays(local_dir: Path) -> None:
    read, idle = make_home(local_dir, "read", 9 * DAY), make_home(local_dir, "idle", 9 * DAY)
    assert (read / "kernel.txt").read_text() == "read", "Triton knows nothing of a manifest"
    assert names(collect_local(local_dir, Limits(max_size=0, least_age=0))) == [str(idle)]
    assert read.exists()


def test_a_compilers_cache_that_is_a_link_to_a_larger_disk_is_looked_through(
    local_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(local_dir / "large", "k", 9 * DAY)
    (local_dir / "cache").symlink_to(home.parent)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(local_dir / "cache"))
    (found,) = names(collect_local(local_dir, Limits(max_size=0, least_age=0)))
    assert found == str(local_dir / "cache" / home.name)
    assert not home.exists()


def test_on_a_node_nothing_is_removed_while_the_store_and_its_pins_are_away(sandbox: Sandbox, local_dir: Path) -> None:
    home = make_home(local_dir, "k", 9 * DAY)
    away = {"KCOORD_STORE": str(sandbox.root / "mount"), "KCOORD_LOCAL_DIR": str(local_dir)}
    (sandbox.root / "mount").mkdir()
    told = kcoord(sandbox, "gc", "--local", "--max-size", "0", "--least-age", "0", code=1, **away).stderr
    assert "there is no store here" in told
    assert home.exists()


def test_what_a_rank_opens_in_the_moment_of_its_removal_is_put_back(
    local_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = make_home(local_dir, "k", 9 * DAY)
    take = Trash.take

    def opened_before(trash: Trash, path: Path) -> Path | None:
        assert local.open_artifact(path) is not None
        return take(trash, path)

    monkeypatch.setattr(Trash, "take", opened_before)
    assert collect_local(local_dir, Limits(max_size=0, least_age=0)).removed == []
    assert local.open_artifact(home) is not None


def test_on_a_node_pinned_places_and_what_is_not_ours_stay(local_dir: Path) -> None:
    home = make_home(local_dir, "k", 9 * DAY)
    foreign = local_dir / "triton" / "SOMETRITONKEY"
    foreign.mkdir(parents=True)
    place = str(home.relative_to(local_dir))
    assert collect_local(local_dir, Limits(max_size=0, least_age=0), pinned={place}).pinned == 1
    assert home.exists()
    assert names(collect_local(local_dir, Limits(max_size=0, least_age=0))) == [str(home)]
    assert foreign.exists()


def test_in_the_users_cache_directory_compilers_own_caches_count_and_go_a_directory_at_a_time(
    local_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's own files have no manifest. Elsewhere a directory without one may be anybody's."""
    home = make_home(local_dir, "k", 2 * DAY)
    graph, code = local_dir / "inductor" / "fxgraph" / "vo" / "fabc", local_dir / "inductor" / "lh"
    required = local_dir / "required-1" / "traces" / "job"
    for directory in (graph, code, required, local_dir / "traces" / "job", local_dir / "required-1" / "objects"):
        directory.mkdir(parents=True)
        (directory / "file").write_bytes(bytes(5000))
        older(directory / "file", 9 * DAY)
    (code / "file").read_bytes()  # by a job, a moment ago
    assert names(collect_local(local_dir, Limits(max_size=0, least_age=0), dry_run=True)) == [str(home)]
    somebodys = tmp_path / "kcoord" / "store" / "v2" / "objects" / "ab"
    local_dir = local_dir.rename(tmp_path / "kcoord")
    home, graph, code, required = (
        local_dir / path.relative_to(tmp_path / "local") for path in (home, graph, code, required)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    somebodys.mkdir(parents=True)
    (somebodys / "file").write_bytes(bytes(5000))
    older(somebodys / "file", 9 * DAY)
    found = collect_local(local_dir, Limits(max_size=0, least_age=0))
    assert (names(found), found.artifacts) == ([str(graph), str(home)], 1)
    assert somebodys.exists()
    assert (graph.exists(), code.exists(), required.exists(), (local_dir / "traces" / "job").exists()) == (
        False,
        True,
        True,
        True,
    )
    assert collect_local(local_dir, Limits(), tidying=AT_ONCE).tidied == {"deleted for good": 2}
    assert not any(path.name.startswith(("fabc", home.name)) for path in local_dir.rglob("*"))


def test_where_access_times_are_not_kept_nothing_is_removed_and_it_is_said(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=1m,noatime", "kcoord-test") as disk:
        home = make_home(disk, "k", 9 * DAY)
        with pytest.raises(StoreError, match="noatime"):
            collect_local(disk, Limits(max_size=0, least_age=0))
        assert home.exists()


# --- by the agent ---

_FIRST_NOW = """
import kcoord.agent.chores.retention as retention
retention.FIRST = retention.LOCAL_FIRST = 0.0
"""
_SOON = f"{_FIRST_NOW}retention.EVERY = 0.5\n"
_YOUNG = """
from kcoord.retention import limits
retention.Limits = lambda **bounds: limits.Limits(**bounds, least_age=0.0)
"""


def test_an_agent_keeps_the_stores_bound_and_spares_what_is_pinned(store: Store) -> None:
    digests = [publish(store, f"k{n}", (20 - n) * DAY) for n in range(20)]
    pack(store, digests[:2], "llama")
    pin(store.root, "llama")
    with Node(store=str(store.root), store_max_size=f"{5 * 4 + 4}KiB") as node:
        start_agent(node, _SOON + _YOUNG)
        until(lambda: sum(there(store, *digests)) == 5)
        assert there(store, *digests[:2], *digests[-3:]) == [True] * 5
        (store.root / "v2" / "collected").stat()
        until(lambda: not list((store.root / "v2" / "leases").glob("*/gc*.lease")))  # between two passes


# --- what there is ---


def test_an_agent_with_metrics_counts_and_shows_it_until_others_have_made_their_passes(store: Store) -> None:
    publish(store, "k")
    for metrics, shown in ((None, {}), ("0", {"artifacts": 1.0, "bytes": 4096.0, "files": 1.0})):
        settings = Settings.from_environ({"KCOORD_STORE": str(store.root)}, metrics=metrics)
        retention = StoreRetention(store.root, settings, LocalLeases(15, 900, 30), "agent", Notices())
        retention._collect(store.root)
        gauges = retention.gauges()
        at = gauges.pop("kcoord_store_counted_timestamp_seconds", 0.0)
        assert gauges == {f"kcoord_store_{name}": value for name, value in shown.items()}
        retention._holdings = Holdings(1, 4096, 1, at - 3 * 3600)
        assert retention.gauges() == {}


def test_the_users_cache_directory_alone_has_a_bound_that_nobody_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ours = tmp_path / "kcoord"
    assert not LocalRetention(tmp_path / "named", None, None, Notices()).chores
    on_node = LocalRetention(ours, None, tmp_path / "a store that is away", Notices())
    assert on_node.chores
    homes = [make_home(ours, name, 9 * DAY) for name in ("a", "b")]
    assert on_node._collect().artifacts == 2, "far below 10 GiB: the store is not asked for its pins"
    on_node = LocalRetention(ours, None, None, Notices())
    monkeypatch.setattr(retention, "LOCAL_BOUND", 1)
    assert on_node._collect().artifacts == 0
    assert not any(home.exists() for home in homes)


def test_an_agent_that_may_not_remove_what_its_bound_costs_says_so_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests = [publish(store, f"k{n}", DAY) for n in range(3)]
    monkeypatch.setattr(Trash, "take", lambda trash, path: None)  # as where its directory is another user's
    notices = Notices()
    settings = Settings.from_environ({"KCOORD_STORE": str(store.root), "KCOORD_STORE_MAX_SIZE": "1"})
    leases = LocalLeases(15, 900, 30)
    leases.reaches_nodes = True  # as if they were Redis'
    retention = StoreRetention(store.root, settings, leases, "agent", notices)
    for _ in range(2):
        retention._collect(store.root)
    (told,) = notices.since(0)[0]
    assert "the store: its bound is not kept: of what was to go, 3 may not be removed by this user" in told
    assert all(there(store, *digests))


def test_an_agent_leaves_the_store_alone_if_another_has_looked_through_it_lately(store: Store) -> None:
    digest = publish(store, "k", DAY)
    stamp = store.root / "v2" / "collected"
    stamp.touch()
    before = stamp.stat().st_mtime
    with Node(store=str(store.root), store_max_size="1", local_max_size="0") as node:
        old = make_home(node.directory, "old", 9 * DAY)
        start_agent(node, _FIRST_NOW)
        until(lambda: not old.exists())  # what is its own it has looked through
    assert stamp.stat().st_mtime == before
    assert there(store, digest) == [True]


def test_the_leader_that_finds_an_artifact_touches_it_and_so_does_one_of_many_that_fetch_it(store: Store) -> None:
    digest = publish(store, "k", 40 * DAY)
    with Node(store=str(store.root)) as node:
        node.start()
        assert isinstance(node.claim(node.client(), "k"), Ready)
        until(lambda: time.time() - store.home(digest).stat().st_mtime < DAY)
        announced = store.fetch(digest)
        assert announced is not None
        touched = 0
        for n in range(200):
            older(store.home(digest), 2 * DAY)
            used = UsedArtifacts(node.directory)
            tiers = Tiers(store, node.directory, Notices(), expectations=Expectations(0.0, 0.0), used=used)
            assert asyncio.run(tiers.from_store(digest, node.directory / "objects" / str(n), announced[2]))
            tiers.close()
            touched += time.time() - store.home(digest).stat().st_mtime < DAY
        assert 1 <= touched <= 40, "12.5 are expected"


# --- the command ---


def test_gc_prints_what_goes_and_why_and_pins_what_a_profile_needs(sandbox: Sandbox) -> None:
    store = Store(sandbox.root / "store")
    store.open()
    digests = [publish(store, f"k{n}", (n + 1) * DAY) for n in range(3)]
    settings = {"KCOORD_STORE": str(store.root)}
    shown = kcoord(sandbox, "gc", "--unused-for", "36h", "--dry-run", **settings).stdout
    assert f"would remove {digests[2][:12]}" in shown
    assert "unused for 3 d" in shown
    pack(store, digests[2:], "llama")
    older(packs_of(store.root, "llama")[0], 3 * DAY)
    assert as_json(sandbox, "gc", "--pin", "llama", **settings)["pins"] == {"llama": 1}
    document = as_json(sandbox, "gc", "--unused-for", "36h", **settings)
    assert [d["artifact"] for d in document["removed"]] == [digests[1]]
    assert (document["artifacts"], document["pinned"], document["removed"][0]["rule"]) == (3, 1, "unused-for")
    assert there(store, *digests) == [True, False, True]
    assert "no profile is pinned" in kcoord(sandbox, "gc", "--unpin", "llama", **settings).stdout
    bounded = as_json(sandbox, "gc", **settings, KCOORD_STORE_MAX_SIZE="4KiB")
    assert [d["artifact"] for d in bounded["removed"] if "/" not in d["artifact"]] == [digests[2]]
    publish(store, "k3", 9 * DAY)
    assert as_json(sandbox, "gc", **settings, KCOORD_STORE_MAX_FILES="1")["removed"][0]["rule"] == "max-files"
    publish(store, "k4", 9 * DAY)
    idle = {"KCOORD_STORE_UNUSED_FOR": "8d"}
    assert as_json(sandbox, "gc", "--unused-for", "10d", **settings, **idle)["removed"] == []
    assert as_json(sandbox, "gc", **settings, **idle)["removed"][0]["rule"] == "unused-for"


def test_a_key_is_withdrawn_from_the_store_its_packs_and_this_node_whatever_limits_and_pins_say(
    sandbox: Sandbox,
) -> None:
    store = Store(sandbox.root / "store")
    store.open()
    bad, good = publish(store, "bad"), publish(store, "good")
    homes = [make_home(sandbox.local, name, 0) for name in ("bad", "good")]
    pack(store, [bad, good], "both")
    pack(store, [good], "other")
    settings = {"KCOORD_STORE": str(store.root)}
    kcoord(sandbox, "gc", "--pin", "both", **settings)
    assert "would remove" in kcoord(sandbox, "gc", "--key", bad[:12], "--dry-run", **settings).stdout
    assert there(store, bad, good) == [True, True]
    told = as_json(sandbox, "gc", "--key", bad[:12], "--local", **settings)
    assert (told["artifacts"], there(store, bad)) == ([str(homes[0])], [True])
    told = as_json(sandbox, "gc", "--key", bad, **settings)
    assert told["artifacts"] == [str(store.home(bad))]
    assert (there(store, bad, good), [home.exists() for home in homes]) == ([False, True], [False, True])
    assert [bool(packs_of(store.root, name)) for name in ("both", "other")] == [False, True]
    assert "nothing here has the key" in kcoord(sandbox, "gc", "--key", bad, code=1, **settings).stderr
