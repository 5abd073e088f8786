"""A job's profile, whose kernels are compiled before the next job of this name."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TypeVar

from kcoord.packs.recipe_files import PARTS
from tests.support.command import KCOORD
from tests.support.sandbox import Sandbox, eventually

T = TypeVar("T")


def run_warmed(sandbox: Sandbox, run: Callable[[dict[str, str]], T], **environ: str) -> tuple[T, T]:
    """What a job's two runs gave: ``run(variables)`` runs it. Before the second, all artifacts are lost and its only kernel is
    compiled from the profile.
    """
    store = sandbox.root / "store"
    job = {"KCOORD_STORE": str(store), "KCOORD_STORE_CREATE": "1", "KCOORD_PROFILE": "job"}
    first = run(job)
    eventually(lambda: PARTS.paths(store / "v2" / "profiles" / "job"), timeout=60, what="the profile is stored")
    for lost in ("objects", "packs"):
        shutil.rmtree(store / "v2" / lost, ignore_errors=True)
    job["KCOORD_LOCAL_DIR"] = str(sandbox.root / "new")
    warmed = sandbox.run_kcoord(*KCOORD, "warmup", "job", **environ, **job)
    assert "1 compiled" in warmed.stdout, warmed.stdout + warmed.stderr
    return first, run(job)
