"""Garbage collection beside what reads and publishes: everybody gets the right bytes or a miss, and what is pinned stays."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kcoord.artifacts import local
from kcoord.artifacts.store import Store
from kcoord.keys import CacheKey
from kcoord.rank.client import Lead, Ready
from kcoord.retention.limits import Limits
from kcoord.retention.local_collector import collect_local, keeps_access_times
from kcoord.retention.pins import pin
from kcoord.retention.store_collector import collect
from kcoord.retention.tidying import Tidying
from kcoord.testing.stores import manifest_of
from tests.support.agents import SOON, Node, until
from tests.support.artifacts import DAY, make_home, publish
from tests.support.cluster import is_whole, start_agent
from tests.support.interpose import Interposer
from tests.support.packs import pack

_ROOT = Path(__file__).parents[2]
_FOR = 2.5  # seconds
_PINNED = 5

_PLAYER = """
import json, random, sys, time
from pathlib import Path
from kcoord.retention.store_collector import collect
from kcoord.retention.tidying import Tidying
from kcoord.retention.limits import Limits
from kcoord.artifacts.store import Store
from kcoord.artifacts.signing import OFF
from kcoord.retention.pins import kept_by_pins
from tests.faults.test_gc import contents, key, manifest_of, pinned

role, root, seconds = sys.argv[1], Path(sys.argv[2]), float(sys.argv[3])
store, until = Store(root), time.monotonic() + seconds
done = missed = 0
while time.monotonic() < until:
    n = random.randrange(40)
    if role == "publish":
        store.publish(manifest_of(contents(n), key(n)), contents(n))
    elif role == "read":
        found = store.fetch(key(n).digest)
        assert found is None or found[1] == contents(n), n
        assert found is not None or n not in pinned(), f"{n} is pinned"
        missed += found is None
    elif role == "use":
        store.touch(key(random.randrange(40)).digest)
        time.sleep(0.01)
    else:
        limits, tidying = Limits(max_size=12288, least_age=0), Tidying(grace=0.5)
        found = collect(root, limits, pinned=kept_by_pins(root, OFF).names, tidying=tidying)
        done += len(found.removed) - 1
    done += 1
print(json.dumps([role, done, missed]))
"""


def key(n: int) -> CacheKey:
    return CacheKey.of("test", f"busy{n}")


def contents(n: int) -> dict[str, bytes]:
    return {f"f{i}": random.Random(n * 10 + i).randbytes(3000) for i in range(3)}


def pinned() -> range:
    return range(_PINNED)


_SLOW = """
import kcoord.retention.store_collector as collector
collector._REST_EVERY, collector._REST = 1, 0.005
"""


def play(role: str, root: Path, seconds: float = _FOR, prelude: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", prelude + _PLAYER, role, str(root), str(seconds)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=_ROOT,
    )  # fmt: skip


def test_readers_and_publishers_never_notice_two_collectors_but_for_misses(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.open()
    for n in pinned():
        store.publish(manifest_of(contents(n), key(n)), contents(n))
    pack(store, [key(n).digest for n in pinned()], "llama")
    pin(store.root, "llama")
    roles = ["publish", "publish", "read", "read", "gc", "gc", "use"]
    players = [play(role, store.root) for role in roles]
    try:
        counts: dict[str, list[int]] = {}
        for player in players:
            output, errors = player.communicate(timeout=120)
            assert player.returncode == 0, errors
            role, done, missed = json.loads(output)
            before = counts.setdefault(role, [0, 0])
            counts[role] = [before[0] + done, before[1] + missed]
    finally:
        for player in players:
            player.kill()
            player.communicate()
    assert counts["gc"][0] > 20, "it had something to do"
    assert counts["read"][0] > counts["read"][1] > 0
    assert not list((store.root / "v2" / "quarantine").glob("*")), "nobody ever saw less than a whole artifact"
    assert all(is_whole(home) for home in store.root.glob("v2/objects/??/*"))
    assert not list((store.root / "v2" / "staging").iterdir())


def test_a_collector_that_is_killed_leaves_nothing_wrong(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    store.open()
    caught = 0
    for _ in range(4):
        digests = [publish(store, f"k{n}", DAY) for n in range(60)]
        collector = play("gc", store.root, 60, _SLOW)
        try:
            until(lambda: any(store.root.glob("v2/trash/*")))
        finally:
            collector.kill()
            collector.communicate()
        homes = list(store.root.glob("v2/objects/??/*"))
        assert all(is_whole(home) for home in homes)
        assert {home.name for home in homes} <= set(digests)
        caught += len(homes) > 12288 // 4096
        collect(store.root, Limits(), tidying=Tidying(grace=-1))
        assert not list((store.root / "v2" / "trash").iterdir())
    assert caught, "none was killed in the middle"
    assert not list((store.root / "v2" / "staging").iterdir())


_GC = "from kcoord.cli import main; main()"


@pytest.mark.parametrize("offset", [-600.0, 400 * DAY], ids=["10 min behind", "a year ahead"])
def test_a_host_whose_clock_is_off_removes_nothing_early(tmp_path: Path, interposer: Interposer, offset: float) -> None:
    store = Store(tmp_path / "store")
    store.open()
    old, fresh = publish(store, "old", 60.0), publish(store, "fresh")
    interposer.clock(offset)
    environ = {**os.environ, **interposer.environ, "KCOORD_LOCAL_DIR": str(tmp_path / "local")}

    def gc(*arguments: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", _GC, "gc", "--store", str(store.root), "--json", *arguments],
            env=environ,
            capture_output=True, text=True, cwd=_ROOT, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [d["artifact"] for d in json.loads(done.stdout)["removed"]]

    told = subprocess.run(
        [sys.executable, "-c", "import time; print(time.time())"], env=environ, capture_output=True, check=True
    )
    assert abs(float(told.stdout) - time.time() - offset) < 60
    assert gc("--unused-for", "5min", "--least-age", "0") == []
    assert gc("--max-size", "0", "--least-age", "5min") == []
    assert gc("--unused-for", "45s", "--least-age", "0") == [old]
    assert store.fetch(fresh) is not None
    gc("--grace", "5min")
    assert len(list((store.root / "v2" / "trash").iterdir())) == 1


def test_a_collected_key_that_many_were_told_is_ready_is_compiled_by_one_of_them(tmp_path: Path) -> None:
    with Node(store=str(tmp_path)) as first, Node(store=str(tmp_path)) as second:
        for node in (first, second):
            start_agent(node)
        client = first.client()
        assert first.publish(client, first.claim(client, "k"), "k")
        until(lambda: list(tmp_path.glob("v2/leases/??/*.outcome")))
        until(lambda: not list(tmp_path.glob("v2/leases/??/*.lease")))
        assert len(collect(tmp_path, Limits(max_size=0, least_age=0)).removed) == 1
        clients = [second.client() for _ in range(4)]
        claims = [second.claiming(each, "k") for each in clients]
        second.until_waiting("k", 3)
        until(lambda: any(claim.done() for claim in claims))
        (leads,) = [claim for claim in claims if claim.done()]
        lead = leads.result(SOON)
        assert isinstance(lead, Lead)
        assert second.publish(clients[claims.index(leads)], lead, "k")
        assert [c.result(SOON) for c in claims if c is not leads] == [Ready("wait")] * 3


_VANISHES = """
import shutil
from kcoord.agent.tiers import Tiers
bring = Tiers.bring_home
async def bring_home(self, digest, there, home):
    if there.parent.name == "homes":
        shutil.rmtree(there, ignore_errors=True)
    return await bring(self, digest, there, home)
Tiers.bring_home = bring_home
"""


def test_what_vanishes_before_it_is_copied_to_where_others_want_it_is_compiled_by_one_of_them() -> None:
    with Node() as node:
        start_agent(node, _VANISHES)
        client = node.client()
        lead = node.claim(client, "k")
        clients = [node.client() for _ in range(3)]
        claims = [node.claiming(each, "k", f"other {n}") for n, each in enumerate(clients)]
        node.until_waiting("k", 3)
        assert node.publish(client, lead, "k")
        node.until_waiting("k", 2)
        until(lambda: any(claim.done() for claim in claims))
        (leads,) = [claim for claim in claims if claim.done()]
        assert isinstance(leads.result(SOON), Lead)
        number = claims.index(leads)
        assert node.publish(clients[number], leads.result(), "k", f"other {number}")
        assert [c.result(SOON) for c in claims if c is not leads] == [Ready("wait")] * 2
        assert [node.read("k", f"other {n}") for n in range(3)] == ["a kernel"] * 3


_LOADER = """
import sys, time
from pathlib import Path
from kcoord.artifacts import local
homes, until, loads = sys.argv[2:], time.monotonic() + float(sys.argv[1]), 0
while time.monotonic() < until:
    for home in homes:
        artifact = local.open_artifact(Path(home))
        assert artifact is not None, home
        assert (artifact.path / "kernel.txt").read_text(), "as Triton does: by its name, after it was verified"
        loads += 1
print(loads)
"""


def test_ranks_load_what_they_use_while_their_node_is_collected(tmp_path: Path) -> None:
    if not keeps_access_times(tmp_path):
        pytest.skip("the temporary directory's file system keeps no access times")
    busy = [make_home(tmp_path / "local", f"busy{n}", 0.0) for n in range(5)]
    idle = [make_home(tmp_path / "local", f"idle{n}", 9 * DAY) for n in range(5)]
    loader = subprocess.Popen(
        [sys.executable, "-c", _LOADER, "2", *map(str, busy)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=_ROOT,
    )  # fmt: skip
    try:
        removed = 0
        while loader.poll() is None:
            limits = Limits(max_size=0, least_age=0)
            removed += len(collect_local(tmp_path / "local", limits, tidying=Tidying(grace=-1)).removed)
            time.sleep(0.001)
        output, errors = loader.communicate()
    finally:
        loader.kill()
        loader.communicate()
    assert loader.returncode == 0, errors
    assert int(output) > 100
    assert removed == len(idle)
    assert all(local.open_artifact(home) is not None for home in busy)
