"""The simulated cluster: small, and whole."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from benchmarks.cluster import plot
from benchmarks.cluster.node import content_of
from benchmarks.cluster.play import ClusterError, Kernels, bound, play
from benchmarks.cluster.table import IN_STEP, PROFILE, STOCK, recorded
from benchmarks.result import Result
from tests.support.living import those_within, words_of
from tests.support.sandbox import Sandbox, eventually

KERNELS: Kernels = [(f"kernel {n}", 0.3 - n / 50) for n in range(10)]


def nothing_is_left(root: Path) -> None:
    def left() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [*those_within(root), *(p for p in children if "benchmarks.cluster.node" in words_of(p))]

    eventually(lambda: not left(), what="no process is left")


@pytest.mark.parametrize("together", [True, False], ids=["profile", "in step"])
def test_each_key_is_compiled_once_and_every_rank_ends_with_every_key(sandbox: Sandbox, together: bool) -> None:
    found = play(sandbox.root, 2, 2, KERNELS, together=together, limit=60)
    assert found.compiled == {name: 1 for name, _ in KERNELS}
    assert found.reached == [10] * 4
    assert (found.alone, found.said) == (0, [])
    assert found.wall >= found.bound
    for node in ("n0", "n1"):
        contents = sorted(f.read_bytes() for f in (sandbox.root / node / "objects").glob("*/*/kernel.cubin"))
        assert contents == sorted(content_of(name) for name, _ in KERNELS), (
            "each node has all of them, as they were compiled"
        )
    assert found.commands >= 2 * len(KERNELS), (
        "the leases are in Redis: at least one command to begin and one to end each"
    )
    nothing_is_left(sandbox.root)


def test_agents_of_several_nodes_share_a_process_and_are_a_cluster_all_the_same(sandbox: Sandbox) -> None:
    found = play(sandbox.root, 5, 2, KERNELS, together=True, limit=60, in_a_process=2)
    assert found.compiled == {name: 1 for name, _ in KERNELS}
    assert found.reached == [10] * 10
    assert (found.alone, found.said) == (0, [])
    assert found.connections == 2 * 5
    nothing_is_left(sandbox.root)


def test_a_cluster_that_takes_too_long_is_ended_with_an_error_that_says_so(sandbox: Sandbox) -> None:
    with pytest.raises(ClusterError, match=r"1 of 1 nodes did not finish in time, node 0 among them"):
        play(sandbox.root, 1, 1, [("endless", 600.0)], together=True, limit=4)
    nothing_is_left(sandbox.root)


def test_a_node_that_cannot_start_is_named_with_its_last_words(sandbox: Sandbox) -> None:
    (sandbox.root / "n1").write_text("in the way")
    with pytest.raises(
        ClusterError, match=r"node 1 ended with code 1 before it could start; its last words: .*FileExists"
    ):
        play(sandbox.root, 2, 1, KERNELS, together=True, limit=30)
    nothing_is_left(sandbox.root)


def test_the_profile_is_300_kernels_longest_first() -> None:
    kernels = recorded()
    assert len({name for name, _ in kernels}) == 300
    assert [s for _, s in kernels] == sorted((s for _, s in kernels), reverse=True)
    assert bound(kernels, 1) == pytest.approx(sum(s for _, s in kernels))
    assert bound(kernels, 10_000) == kernels[0][1]


def test_a_saved_result_is_drawn_with_every_point_that_was_measured() -> None:
    result = Result(
        "A simulated cluster: <300> kernels", ["nodes", "ranks", "way", "wall s", "bound s", "wall ÷ bound"]
    )
    result.rows = [
        ["1", "8", PROFILE, "22.40", "22.02", "1.02"],
        ["8", "64", PROFILE, "5.40", "2.75", "1.96"],
        ["8", "64", IN_STEP, "178.00", "2.75", "64.70"],
        ["1", "8", STOCK, "176.14", "22.02", "8.00"],
        ["8", "64", STOCK, "176.14", "2.75", "64.05"],
    ]
    title, ways = plot.read(result.text())
    assert title == result.title
    assert ways[PROFILE] == [(8, 22.4), (64, 5.4)]
    assert ways["bound"] == [(8, 22.02), (64, 2.75)]
    drawing = ElementTree.fromstring(plot.draw(title, ways))
    namespace = "{http://www.w3.org/2000/svg}"
    assert drawing.findtext(f"{namespace}title") == result.title
    marks = [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in drawing.iter(f"{namespace}circle")]
    first, second, legend = marks
    assert first[0] < second[0], "more ranks are further to the right"
    assert first[1] < second[1] < legend[1], "a shorter wall is further down, and the legend below everything"
    labels = {text.text for text in drawing.iter(f"{namespace}text")}
    assert {"22.4", "5.4", "8", "64", "10 s", "100 s"} <= labels


def test_what_is_no_result_of_the_cluster_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.md").write_text("# Odd\n\n| a | b |\n| --- | --- |\n| 1 | 2 |\n")
    assert plot.main(str(tmp_path / "odd.md")) == 1
    assert "holds no table of the simulated cluster" in capsys.readouterr().err
