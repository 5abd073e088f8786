"""The text of a pass pipeline: ``builtin.module(cute-to-nvvm{opt-level=3 cubin-chip=sm_90a …})``."""

from __future__ import annotations

import re

from kcoord.keys.device import GPUTarget

_CHIP = re.compile(r"\bcubin-chip='?sm_(\w+)")
_WITH_LINES = re.compile(r"\b(?:preserve-line-info|enable-assertions|enable-iket)(?:=true)?(?=[\s}])")
_WITH_FILES = re.compile(r"\b((?:dump|print)-[\w-]+|flatten-locs-output-json-path)(?!=false)(?==|[\s}])")
_LINKS = re.compile(r"\blink-libraries=")


def target(pipeline: str) -> GPUTarget | None:
    """The GPU that code is generated for; None if the pipeline names none."""
    chips = _CHIP.findall(pipeline)
    try:
        return GPUTarget.parse(f"cuda:{chips[-1]}") if chips else None
    except ValueError:
        return None


def keeps_lines(pipeline: str) -> bool:
    """True if the code may name files and lines of the source: line tables, and the messages of assertions before 4.6."""
    return _WITH_LINES.search(pipeline) is not None


def output(pipeline: str) -> str:
    """The first option by which a compile writes files, or prints; empty if there is none."""
    found = _WITH_FILES.search(pipeline)
    return found[1] if found else ""


def links(pipeline: str) -> bool:
    """True if libraries of device code are linked."""
    return _LINKS.search(pipeline) is not None
