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

config.fallback_by_default = True  # no C++ to build
torch.compile(lambda x: x @ x)(torch.ones(4, 4))
print(len(psutil.Process().children(recursive=True)))
"""


def test_a_rank_whose_graphs_are_for_the_cpu_starts_no_compile_worker_as_in_stock(sandbox: Sandbox) -> None:
    rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TORCHINDUCTOR_COMPILE_THREADS": "4"}
    for arguments in ([], ["kcoord"]):
        caches = str(sandbox.root / "-".join(("caches", *arguments)))
        done = sandbox.run("-c", PROGRAM, *arguments, timeout=120, TORCHINDUCTOR_CACHE_DIR=caches, **rank)
        assert (done.stdout, done.returncode) == ("0\n", 0), done.stderr
