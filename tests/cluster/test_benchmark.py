"""The simulated cluster: small, and whole."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from benchmarks.cluster import earlier_job
from benchmarks.cluster.node import content_of
from benchmarks.cluster.play import Kernels, LightNodes, play
from benchmarks.cluster.processes import ClusterError
from benchmarks.nfs_model import NfsServer
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


def test_a_node_that_cannot_start_is_named_with_its_last_words(sandbox: Sandbox) -> None:
    (sandbox.root / "n1").write_text("in the way")
    with pytest.raises(
        ClusterError, match=r"node 1 ended with code 1 before it could start; its last words: .*FileExists"
    ):
        play(sandbox.root, 2, 1, KERNELS, together=True, limit=30)
    nothing_is_left(sandbox.root)


def test_a_dilation_finds_every_wait_of_kcoords_that_it_makes_longer(sandbox: Sandbox) -> None:
    """Their names are in other modules, where nothing else tells that a benchmark reads them."""
    run = sandbox.run("-c", "from benchmarks.cluster.dilation import dilate; dilate(2)")
    assert run.returncode == 0, run.stderr
