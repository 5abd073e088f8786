"""Compiles that are not shared, and why."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kcoord.backends.cutedsl import pipelines

if TYPE_CHECKING:
    from kcoord.backends.cutedsl.backend import Traced

_KEEP = "CUTE_DSL_KEEP"


def against(request: Traced) -> str:
    """Why `request` must not be shared; empty if it may be."""
    option = pipelines.output(request.pipeline)
    if option:
        return f"{option} asks for files of the compile itself"
    if os.environ.get(_KEEP):  # the passes read it, too
        return f"{_KEEP} asks for files of the compile itself"
    if pipelines.links(request.pipeline):
        return "it links libraries that its pipeline only names"
    if request.diagnostics.get("remark_output") or request.diagnostics.get("collect_compiler_diagnostics"):
        return "the compiler's remarks and warnings are asked for"
    return ""
