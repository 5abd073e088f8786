"""Ranks that Lightning's trainer starts: by spawn, by fork, and as commands."""

from __future__ import annotations

import pytest

from tests.support.sandbox import Sandbox
from tests.support.workers import below_exec, check

pytest.importorskip("lightning", reason="make test-platforms installs Lightning")


@pytest.mark.parametrize("strategy", ["ddp_spawn", "ddp_fork", "ddp"])
def test_ranks_compile_each_kernel_once(sandbox: Sandbox, strategy: str) -> None:
    check(sandbox, below_exec(sandbox, "lightning_workers.py", strategy))
