"""The simulated cluster: small, and whole."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import psutil
import pytest

from benchmarks.cluster import earlier_job, plot, plot_scale, scale
from benchmarks.cluster.node import content_of
from benchmarks.cluster.play import Kernels, LightNodes, Measured, bound, play
from benchmarks.cluster.processes import ClusterError
from benchmarks.cluster.table import IN_STEP, PROFILE, STOCK, recorded
from benchmarks.nfs_model import NfsServer
from benchmarks.result import Result
from tests.support import interpose
from tests.support.living import those_within, words_of
from tests.support.sandbox import Sandbox, eventually

KERNELS: Kernels = [(f"kernel {n}", 0.3 - n / 50) for n in range(10)]


def nothing_is_left(root: Path) -> None:
    def left() -> list[psutil.Process]:
        children = psutil.Process().children()
        return [
            *those_within(root),
            *(p for p in children if {"benchmarks.cluster.node", "benchmarks.cluster.light"} & set(words_of(p))),
        ]

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


@pytest.mark.skipif(interpose.find_compiler() is None, reason="no C compiler")
def test_light_nodes_share_the_work_with_whole_ones_and_load_the_server_as_these_do(sandbox: Sandbox) -> None:
    server = NfsServer(sandbox.root / "server", sandbox.root / "store", 2.0)
    slower = [(name, 2 * seconds) for name, seconds in KERNELS]
    light = LightNodes(3, ranks=1, fetch=100)
    found = play(sandbox.root, 1, 2, slower, together=True, limit=60, light=light, slower=2.0, server=server)
    assert found.compiled == {name: 1 for name, _ in KERNELS}
    assert found.reached == [10] * 2
    assert (found.alone, found.said) == (0, [])
    assert found.connections == 2 * 4, "each node has its own leases"
    assert found.heard, "light nodes hear of each other's kernels"
    assert found.requests >= 100 * 10 * 2, "each node fetches each kernel of another"
    nothing_is_left(sandbox.root)


@pytest.mark.skipif(interpose.find_compiler() is None, reason="no C compiler")
def test_a_pack_of_an_earlier_job_spares_the_look_ups_of_each_kernel(sandbox: Sandbox) -> None:
    server = NfsServer(sandbox.root / "server", sandbox.root / "store")
    manifests = earlier_job.fill(sandbox.root / "store", KERNELS, pack=True)
    found = play(sandbox.root, 1, 2, KERNELS, together=False, limit=60, server=server,
                 settings={"profile": earlier_job.PROFILE}, prepare=lambda url: earlier_job.announce(url, manifests))  # fmt: skip
    assert (found.compiled, found.reached) == ({}, [10] * 2)
    assert found.commands == 0, "the pack answers"
    assert found.requests < 8 * 10


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


def test_the_rows_of_a_large_cluster_are_drawn_beside_their_goals() -> None:
    found = Measured(
        1250, 1278, 300, wall=200.0, bound=10.57, compiled={"kernel": 1}, reached=[300], alone=0, agent_cpu=1.0,
        redis_cpu=0.66, redis={"evalsha": (3750, 9000)}, connections=2500, memory=1250 << 15, told=[0.4, 2.0], machine=90.0,
        saturated=0.5, said=[], ours=40.0, heard=[0.1, 0.8], requests=3_000_000, agent_memory=45e6,
    )  # fmt: skip
    result = Result("A simulated cluster on a modelled NFS", list(scale.COLUMNS))
    result.rows = [scale.cells(scale.Row(1250, 300, way), found, 4.0) for way in scale.WAYS]
    rows = plot_scale.read(result.text())
    cold = rows[0]
    assert (cold["wall s"], cold["bound: store s"], cold["wall ÷ bound"]) == ("50.00", "50.00", "1.00")
    assert cold["heard, 99 % ms"] == "200", "times are those of the cluster, not of the slower clock"
    assert cold["Redis CPU s"] == "0.66", "CPU is this machine's"
    titles = [title for title, _, _ in plot_scale.drawings(rows)]
    drawing = ElementTree.fromstring(plot_scale.draw(rows))
    texts = [text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")]
    assert [title for title in titles if title in texts] == titles
    assert {"cold, with a profile", "warm, pack", "goal for 99 %", "1,250"} <= set(texts)


def test_a_dilation_finds_every_wait_of_kcoords_that_it_makes_longer(sandbox: Sandbox) -> None:
    """Their names are in other modules, where nothing else tells that a benchmark reads them."""
    run = sandbox.run("-c", "from benchmarks.cluster.dilation import dilate; dilate(2)")
    assert run.returncode == 0, run.stderr
