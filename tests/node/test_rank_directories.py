"""Ranks with a cache directory of their own each, and tuners with one that they throw away."""

from __future__ import annotations

import shutil
from typing import Any

import pytest

from kcoord.artifacts.store import Store
from kcoord.packs.recipe_files import parts
from kcoord.rank.client import AgentClient, Lead, Ready
from kcoord.settings import Settings
from kcoord.telemetry.events import Notices
from tests.support.agents import Node, key_of
from tests.support.redis_server import RedisServer
from tests.support.sandbox import PROGRAMS, Sandbox, eventually
from tests.support.triton_ranks import fork_rank, hooked, report, totals


@pytest.fixture
def node() -> Any:
    with Node() as made:
        made.start()
        yield made


def test_a_rank_that_comes_later_has_the_artifact_brought_to_its_own_directory(node: Node) -> None:
    client = node.client()
    assert node.publish(client, node.claim(client, "k", "rank0"), "k", "rank0")
    assert node.claim(node.client(), "k", "rank1") == Ready("store")
    assert node.read("k", "rank1") == "a kernel"


def test_a_directory_that_has_vanished_is_forgotten(node: Node) -> None:
    client = node.client()
    assert node.publish(client, node.claim(client, "k", "rank0"), "k", "rank0")
    shutil.rmtree(node.home("k", "rank0"))
    lead = node.claim(client, "k", "rank1")
    assert isinstance(lead, Lead)
    assert node.publish(client, lead, "k", "rank1")
    assert node.claim(client, "k", "rank0") == Ready("store")


def test_an_artifact_that_was_altered_in_one_directory_is_not_brought_to_another(node: Node) -> None:
    client = node.client()
    assert node.publish(client, node.claim(client, "k", "rank0"), "k", "rank0")
    (node.home("k", "rank0") / "kernel.txt").write_text("no kernel")
    lead = node.lead(client, "k", "rank1")
    assert not node.home("k", "rank1").exists()
    client.give_up(lead, key_of("k"))


def test_ranks_with_directories_of_their_own_compile_each_kernel_once_in_turn(sandbox: Sandbox) -> None:
    """TRITON_CACHE_DIR=…/rank0, which vLLM, verl and many scripts set. Each begins when the one before has ended."""
    directories = [str(sandbox.root / f"rank{r}") for r in range(3)]
    done = [
        report(fork_rank(sandbox, "--kernels", "2", **hooked(sandbox, r, TRITON_CACHE_DIR=directory)))
        for r, directory in enumerate(directories)
    ]
    assert totals(done) == (2, 4)
    assert all(path.startswith(f"{directories[r]}/") for r, one in enumerate(done) for path in one["paths"])


TUNER = """
import os, sys, tempfile
sys.path.insert(0, {programs!r})
import triton
import kernels
native = triton.compile
compiled = []
triton.knobs.compilation.listener = lambda *, cache_hit, metadata, **_: compiled.append(not cache_hit)
with tempfile.TemporaryDirectory() as directory:
    triton.knobs.cache.dir = directory
    for factor in range(3):
        kernels.build_scale(factor + 2)
    triton.knobs.cache.dir = {cache!r}
    kernels.build_scale(3)
print(sum(compiled))
"""


def test_of_the_kernels_that_a_tuner_compiles_in_a_temporary_directory_the_used_one_is_published(
    sandbox: Sandbox,
) -> None:
    """Helion compiles each candidate in a `TemporaryDirectory`, and the best one once more where Triton's cache is."""
    store = Store(sandbox.root / "store")
    shared = {"KCOORD_STORE": str(store.root), "KCOORD_STORE_CREATE": "1", "KCOORD_PROFILE": "job"}
    environ = hooked(sandbox, 0, **shared)
    program = TUNER.format(programs=str(PROGRAMS), cache=environ["TRITON_CACHE_DIR"])
    done = sandbox.run("-c", "import kcoord; kcoord.install()\n" + program, **environ)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n"
    eventually(lambda: len(list(store.digests())) == 1)
    client = AgentClient(Settings.from_environ({**environ, **shared}), Notices())
    assert client.stop()
    client.close()
    eventually(lambda: not sandbox.processes())
    assert len(list(store.digests())) == 1, "an agent that ends has published what it was given"
    (recipe,) = parts(store.root / "v2" / "profiles" / "job", Notices())
    assert recipe.qualname == "scale"


def test_a_directory_that_merely_lies_in_the_temporary_directory_is_published_as_ever(sandbox: Sandbox) -> None:
    store = Store(sandbox.root / "store")
    shared = {"KCOORD_STORE": str(store.root), "KCOORD_STORE_CREATE": "1"}
    directory = str(sandbox.root / "tmp" / "triton")
    environ = hooked(sandbox, 0, TRITON_CACHE_DIR=directory, **shared)
    assert totals([report(fork_rank(sandbox, "--kernels", "2", **environ))]) == (2, 0)
    eventually(lambda: len(list(store.digests())) == 2)


def test_a_directory_that_passes_holds_up_no_other_node_and_its_artifact_reaches_the_waiter_who_keeps_it() -> None:
    with RedisServer() as server, Node(redis_url=server.url) as node, Node(redis_url=server.url) as other:
        node.start()
        other.start()
        client, elsewhere = node.client(), other.client()
        lead = client.claim(key_of("k"), node.home("k", "tuner"), passing=True)
        theirs = elsewhere.claim(key_of("k"), other.home("k", "tuner"), passing=True)
        assert isinstance(lead, Lead)
        assert isinstance(theirs, Lead)
        waiting = node.claiming(node.client(), "k", "used")
        node.until_waiting("k", 1)
        assert node.publish(client, lead, "k", "tuner")
        assert waiting.result(20) == Ready("wait")
        assert node.read("k", "used") == "a kernel"
        elsewhere.give_up(theirs, key_of("k"))
