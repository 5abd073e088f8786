"""Profiles for tests: recipes, and jobs that record and replay them (`programs/profiled.py`)."""

from __future__ import annotations

import json
from typing import Any

import kcoord
from kcoord.packs.recipe import Recipe
from kcoord.packs.recipe_files import load_profile, save_part
from kcoord.settings import Settings
from tests.support.sandbox import PROGRAMS, Sandbox, Started, eventually, finish

PROGRAM = PROGRAMS / "profiled.py"


def recipe(n: int = 0, seconds: float = 1.0, order: int = 0, call: Any = None) -> Recipe:
    return Recipe("python", "train.kernels", "build", (n,) if call is None else call, "cuda:90", seconds, order)


def rank(sandbox: Sandbox, n: int, world: int, *arguments: str, **more: str | None) -> Started:
    return sandbox.fork_kcoord(PROGRAM, *arguments, RANK=str(n), LOCAL_RANK=str(n), WORLD_SIZE=str(world),
                               LOCAL_WORLD_SIZE=str(world), **more)  # fmt: skip


def said(process: Started) -> dict[str, Any]:
    done = finish(process)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def settings_of(sandbox: Sandbox, local: str = "local") -> Settings:
    return Settings.from_environ({"KCOORD_LOCAL_DIR": str(sandbox.root / local)})


def record(sandbox: Sandbox, name: str = "job", count: int = 8) -> list[Recipe]:
    """A profile of `count` recipes, recorded by one rank, in a local directory of its own."""
    said(rank(sandbox, 0, 1, "use", str(count), KCOORD_LOCAL_DIR=str(sandbox.root / "first"), KCOORD_PROFILE=name))
    eventually(lambda: len(recipes(sandbox, name)) == count, what="the profile was written")
    return recipes(sandbox, name)


def recipes(sandbox: Sandbox, name: str) -> list[Recipe]:
    try:
        return load_profile(settings_of(sandbox, "first"), name)
    except kcoord.KcoordError:
        return []


def give(sandbox: Sandbox, found: list[Recipe], name: str = "job") -> None:
    """The profile, and nothing that it would compile."""
    save_part(sandbox.local / "profiles" / name, found)
