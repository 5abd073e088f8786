"""Torch's functions, wrapped: what a rank does beside its compiles."""

from __future__ import annotations

import pytest

from tests.support.sandbox import Sandbox

pytest.importorskip("torch")

PROGRAM = """
import sys

if sys.argv[1:] == ["kcoord"]:
    import kcoord

    kcoord.install()
import psutil
import torch
from torch._inductor import config

config.compile_threads = 4
config.fallback_by_default = True  # no C++ to build
torch.compile(lambda x: x @ x)(torch.ones(4, 4))
print(len(psutil.Process().children(recursive=True)))
"""


def test_a_rank_whose_graphs_are_for_the_cpu_starts_no_compile_worker_as_in_stock(sandbox: Sandbox) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    for arguments in ([], ["kcoord"]):
        caches = str(sandbox.root / "-".join(("caches", *arguments)))
        done = sandbox.run_forked("-c", PROGRAM, *arguments, TORCHINDUCTOR_CACHE_DIR=caches, **rank)
        assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr


DRAWN = """
import random
import sys
import kcoord
import torch
from torch._functorch import config

kcoord.install()
config.bypass_autograd_cache_key = True
random.seed(0)  # as a training script does
torch._inductor.config.fallback_by_default = True  # no C++ to build

@torch._dynamo.allow_in_graph  # torch makes no key of it
def opaque(x):
    return x * float(sys.argv[1])

print(torch.compile(lambda x: opaque(x) + 1)(torch.ones(1)).item())
"""


def test_a_unit_whose_key_torch_has_drawn_at_random_is_not_shared(sandbox: Sandbox) -> None:
    """Two ranks with one seed draw the same key for different graphs."""
    for factor in ("2", "3"):
        caches = str(sandbox.root / factor)
        done = sandbox.run_forked("-c", DRAWN, factor, TORCHINDUCTOR_CACHE_DIR=caches)
        assert (done.stdout, done.returncode) == (f"{float(factor) + 1}\n", 0), done.stderr
        assert "torch has drawn its key at random" in done.stderr


@pytest.mark.parametrize(("key", "is_drawn"), [("0.8444218515250481", True), ("a" * 32, True), ("a" + "b" * 51, False)])
def test_a_number_and_a_uuid_are_no_keys_of_torch(key: str, is_drawn: bool) -> None:
    from kcoord.backends.inductor import hooks
    from kcoord.backends.inductor.compiles import OpenCompile
    from kcoord.backends.inductor.request import UNIT

    assert bool(hooks._asked(OpenCompile(UNIT), key, []).problem) is is_drawn
