"""Ranks of a Triton job that find kcoord's cache manager in their environment, without `kcoord.install`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from kcoord.artifacts.manifest import MANIFEST_NAME
from kcoord.settings import Settings
from tests.support import forked, toolchain
from tests.support.sandbox import PROGRAMS, WITH_TRITON, Sandbox, Started, eventually, finish
from tests.support.shared_servers import fork_server

_gates = itertools.count()
RANK = PROGRAMS / "rank.py"
MANAGER = "kcoord.backends.triton.cache_manager:TritonCacheManager"


def hooked(sandbox: Sandbox, rank: int, local: str = "local", **more: str | None) -> dict[str, str | None]:
    root = sandbox.root / local
    toolchain.share(root)
    given = {name: value for name, value in more.items() if value and name.startswith("KCOORD_")}
    tier = Settings.from_environ({"KCOORD_LOCAL_DIR": str(root), **given}).local_dir
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "KCOORD_LOCAL_DIR": str(root),
        "TRITON_CACHE_MANAGER": MANAGER,
        "TRITON_CACHE_DIR": str(tier / "triton"),
        **more,
    }


def fork_rank(sandbox: Sandbox, *arguments: str | Path, **more: str | None) -> Started:
    pools = {forked.POOLS: fork_server((WITH_TRITON,)).address}
    return sandbox.fork(RANK, *arguments, preload=WITH_TRITON, **{**pools, **more})


def report(process: Started) -> dict[str, Any]:
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert "stands aside from" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"stderr": done.stderr}


def run_ranks(sandbox: Sandbox, count: int, *arguments: str, **more: str | None) -> list[dict[str, Any]]:
    """Ranks that begin to compile in the same moment."""
    gate = sandbox.root / f"gate{next(_gates)}"
    start = [fork_rank(sandbox, *arguments, "--gate", gate, **hooked(sandbox, r, **more)) for r in range(count)]
    eventually(lambda: len(list(sandbox.root.glob(f"{gate.name}.*"))) == count or any(p.poll() for p in start), 60)
    gate.touch()
    return [report(p) for p in start]


def totals(reports: list[dict[str, Any]]) -> tuple[int, int]:
    return sum(len(r["compiled"]) for r in reports), sum(len(r["loaded"]) for r in reports)


def homes(sandbox: Sandbox, local: str = "local") -> list[Path]:
    return sorted(p.parent for p in (sandbox.root / local / "triton").glob(f"*/{MANIFEST_NAME}"))
