"""A rank that compiles beside a slow one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.sandbox import Sandbox, eventually
from tests.support.triton_ranks import fork_rank, homes, hooked, report

pytest.importorskip("triton")

EARLY = {"KCOORD_HEDGE": "1", "KCOORD_HEDGE_AFTER": "0.2"}


def hedged(sandbox: Sandbox, *arguments: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the slow rank and its hedge say. The slow one publishes while the hedge still compiles, which then goes on."""
    known = report(fork_rank(sandbox, "--kernels", "2", **hooked(sandbox, 0, **EARLY)))
    shutil.rmtree(Path(known["paths"][-1]).parent)  # the agent knows how long the second kernel takes
    ranks = []
    for number in (0, 1):
        begun, go = sandbox.root / f"begun{number}", sandbox.root / f"go{number}"
        steps = ("--kernels", "2", "--compiling", begun, "--until", go, *arguments)
        ranks.append((fork_rank(sandbox, *steps, **hooked(sandbox, number, **EARLY)), go))
        eventually(begun.exists, 60, f"rank {number} compiles")
    said = []
    for rank, go in ranks:
        go.touch()
        said.append(report(rank))
    return said[0], said[1]


def test_a_hedge_whose_slow_rank_has_published_compiles_to_its_end_and_harms_nobody(sandbox: Sandbox) -> None:
    slow, hedge = hedged(sandbox)
    assert (len(slow["compiled"]), len(hedge["compiled"])) == (1, 1)
    assert hedge["cubins"] == slow["cubins"]
    assert len(homes(sandbox)) == 2
