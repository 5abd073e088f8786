"""Rows of Triton: Python that runs while a kernel is compiled (``triton.constexpr_function``, from 3.5 on)."""

from __future__ import annotations

import triton

from tests.stale.row import Row
from tests.stale.triton_values import NEW, SAME, stores


def computes(
    what: str, setup: str, body: str, edit: tuple[str, str] | None, change: str, undo: str, names: str, **more: object
) -> Row:
    """A kernel that stores what a function of the host returns."""
    host = f"\n@triton.constexpr_function\ndef host():\n    return {body}\n"
    return stores(what, setup + host, "host()", edit, change, undo, names, **more)  # type: ignore[arg-type]


ROWS = [
    computes("a function of the host", "def helper(): return 3", "1", ("return 1", "return 2"),
             "original, host = host, triton.constexpr_function(helper)", "host = original", "host"),
    computes("a list that a function of the host reads", "SIZES = [1, 2]", "len(SIZES)",
             ("[1, 2]", "[1, 2, 3]"), "SIZES.append(3)", "SIZES.pop()", "SIZES", stock=NEW),
    computes("a module's constant that a function of the host reads", "from . import consts", "consts.TILE",
             ("TILE = 1", "TILE = 2"), "consts.TILE = 2", "consts.TILE = 1", "TILE", stock=SAME | NEW,
             files={"consts.py": "TILE = 1\n"}),
    computes("an environment variable that a function of the host reads", "import os", "int(os.environ['SUBJECT_FLAG'])",
             None, "", "", "", environ={"SUBJECT_FLAG": ("1", "2")}, stock=SAME | NEW),
] if hasattr(triton, "constexpr_function") else []  # fmt: skip
