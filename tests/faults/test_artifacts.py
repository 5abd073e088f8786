"""Damaged and forged artifacts, in the store and on a node: real ranks refuse them, and get the right bytes all the same.

What is damaged for everybody is moved aside and compiled again; what *one* reader cannot read, or reads wrongly, stays.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord.artifacts import local
from kcoord.artifacts.manifest import MANIFEST_NAME
from tests.support.agents import until
from tests.support.cluster import BACK, CANNOT, NODES, QUICK, Cluster, cluster, key_digest, start_agent

Damage = Callable[[Path], object]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def _link(path: Path) -> None:
    """To a true copy of what was there."""
    elsewhere = path.parent.parent / f"{path.parent.name}-{path.name}.elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _grow(path: Path) -> None:
    """A terabyte, which takes no disk."""
    os.truncate(path, 1 << 40)


_IN_STORE: dict[str, Damage] = {
    "a flipped bit": _flip,
    "a truncated file": lambda path: os.truncate(path, path.stat().st_size - 1000),
    "a link in its place": _link,
    "a pipe": _pipe,
    "a huge file": _grow,
}
"""Others, and lies: `kcoord.testing.stores`, `tests/unit/artifacts/test_store.py` and `test_manifest.py`."""
_ON_A_NODE: dict[str, Damage] = {
    "a flipped bit": lambda home: _flip(home / "kernel.bin"),
    "a missing file": lambda home: (home / "kernel.bin").unlink(),
    "a linked file": lambda home: _link(home / "kernel.bin"),
    "a pipe": lambda home: _pipe(home / "kernel.bin"),
    "a huge file": lambda home: _grow(home / "kernel.bin"),
    "a manifest that is a pipe": lambda home: _pipe(home / MANIFEST_NAME),
    "a huge manifest": lambda home: _grow(home / MANIFEST_NAME),
    "a linked directory": _link,
}
"""Others: `tests/unit/artifacts/test_local_tier.py`."""


def in_quarantine(root: Path) -> int:
    return len(list(root.iterdir())) if root.exists() else 0


def test_what_is_damaged_in_the_store_is_moved_aside_and_compiled_again(tmp_path: Path) -> None:
    with cluster(tmp_path / "store", damaged=True) as made:
        made.start()
        made.add_ranks(1)
        first, second = made.ranks
        quarantine = made.store.root / "v2" / "quarantine"
        for number, (name, damage) in enumerate(_IN_STORE.items()):
            made.ask(name, [first])
            until(lambda name=name: made.holds(name))
            damage(made.store.home(key_digest(name)))
            (told,) = made.ask(name, [second])
            assert told["compiled"] == 1, name
            until(lambda name=name: made.holds(name))
            assert in_quarantine(quarantine) == number + 1, name
        for log in made.logs():
            assert CANNOT not in log, log
            assert "Traceback" not in log, log


@pytest.mark.parametrize("shared", [True, False])
def test_what_is_damaged_on_a_node_is_moved_aside_there_and_had_again(tmp_path: Path, shared: bool) -> None:
    """From the store; without one it is compiled again."""
    with cluster(tmp_path / "store") as made:
        node = made.nodes[0]
        if not shared:
            del node.flags["store"], node.flags["redis_url"]
            node.settings = node.with_flags()
        start_agent(node)
        made.nodes[1:] = []
        made.add_ranks()
        first, second = made.ranks
        for name, damage in _ON_A_NODE.items():
            (told,) = made.ask(name, [first])
            until(lambda name=name: not shared or made.holds(name))
            home = Path(told["path"])
            damage(home)
            (told,) = made.ask(name, [second])
            assert told["compiled"] == (0 if shared else 1), name
            assert told["path"] == str(home), "it was not put back into its place"
            assert local.open_artifact(home, key_digest(name)) is not None
            assert in_quarantine(local.quarantine_of(home)) >= 1


_MISREADS = """
import io, random
import kcoord.artifacts.store as store
left = TIMES
class Misread(io.FileIO):
    def read(self, size=-1):
        global left
        content = bytearray(super().read(size))
        if content and left:
            left -= 1
            content[random.randrange(1000, len(content))] ^= 1 << random.randrange(8)
        return bytes(content)
store.open_plain = lambda path, most, *, afresh=False: Misread(path)
"""


@pytest.mark.parametrize(("times", "compiles"), [(1, 0), (3, 0), (10**9, 1)])
def test_a_reader_whose_memory_flips_bits_takes_nothing_from_the_others(
    tmp_path: Path, times: int, compiles: int
) -> None:
    """It reads twice for what READY announced, and twice more as the leader, before it gives up."""
    with cluster(tmp_path / "store") as made:
        start_agent(made.nodes[0])
        start_agent(made.nodes[1], QUICK + _MISREADS.replace("TIMES", str(times)))
        made.add_ranks(1)
        first, second = made.ranks
        made.ask("k", [first])
        until(lambda: made.holds("k"))
        home = made.store.home(key_digest("k"))
        inode = home.stat().st_ino
        (told,) = made.ask("k", [second])
        assert told["compiled"] == compiles
        assert made.holds("k")
        assert home.stat().st_ino == inode, "the store's copy was taken away, or replaced"
        assert in_quarantine(made.store.root / "v2" / "quarantine") == 0
        until(lambda: made.logs()[1].count(CANNOT) == made.logs()[1].count(BACK) <= 1)
        assert CANNOT not in made.logs()[0]


def test_of_two_nodes_that_publish_one_key_at_once_every_rank_has_one_whole_artifact(tmp_path: Path) -> None:
    """Their compilers write different bytes; a rank ends if it finds files of both."""
    with cluster(tmp_path / "store", strangers=True) as made:
        made.start()
        made.add_ranks(writers=True)
        races = 0
        for number in range(_RACES):
            name = f"k{number}"
            told = made.ask(name)
            assert 1 <= sum(t["compiled"] for t in told) <= NODES
            races += sum(t["compiled"] for t in told) == NODES
            for node in range(NODES):
                assert len({t["writer"] for t in told[2 * node : 2 * node + 2]}) == 1, "one node's ranks differ"
            until(lambda name=name: made.holds(name))
        assert races, "they were never at it at once: the test shows nothing"
        assert in_quarantine(made.store.root / "v2" / "quarantine") == 0
        until(lambda: made.left_in_staging() == [])
        fresh(made)


_RACES = 6


def fresh(made: Cluster) -> None:
    """Nodes that come later all get the winner's."""
    for node in made.nodes:
        shutil.rmtree(node.directory / "objects")
    made.ranks.clear()
    made.add_ranks(writers=True)
    for number in range(_RACES):
        told = made.ask(f"k{number}")
        assert sum(t["compiled"] for t in told) == 0
        assert len({t["writer"] for t in told}) == 1
