"""Rows of Triton: what is neither code nor value of the program. Environment, device, tools."""

from __future__ import annotations

from triton._C.libtriton import amd

from tests.stale.row import Row
from tests.stale.triton_values import HEAD, NEW, SAME

_FUSED = (
    HEAD
    + """
@triton.jit
def kernel(x):
    v, w = tl.load(x).to(tl.float32), tl.load(x + 1).to(tl.float32)
    tl.store(x, (v * w + 1.5).to(tl.int32))  # {what}
"""
)


def compiles(what: str, **more: object) -> Row:
    """A kernel that multiplies and adds, among other things: a compiler has choices."""
    return Row(what, _FUSED, "launch(kernel)", **more)  # type: ignore[arg-type]


ENVIRONMENT = [
    compiles("floating-point fusion", environ={"TRITON_DEFAULT_FP_FUSION": ("1", "0")}, stock=SAME),
    compiles("the optimization of ptxas", environ={"DISABLE_PTXAS_OPT": (None, "1")}, stock=SAME),
]  # fmt: skip

_SETS = """

SET = {before}

def knob(launch, kernel):
    with triton.knobs.{section}.scope():
        triton.knobs.propagate_env = False
        try:
            triton.knobs.{section}.{name} = SET
        finally:
            triton.knobs.propagate_env = True
        return launch(kernel)
"""


def sets(what: str, section: str, name: str, before: object, after: object, **more: object) -> Row:
    """A kernel that is compiled while a knob of Triton's has a value that the environment does not show."""
    subject = _FUSED + _SETS.format(section=section, name=name, before=before)
    then = (f"SET = {after}", f"SET = {before}")
    return Row(what, subject, "knob(launch, kernel)", then[::-1], *then, **more)  # type: ignore[arg-type]


KNOBS = [
    sets("a knob of the compiler", "language", "default_fp_fusion", True, False, stock=SAME),
    sets("a knob of a tool", "nvidia", "disable_ptxas_opt", False, True, stock=SAME | NEW),
    sets("a knob that hides a variable", "nvidia", "disable_ptxas_opt", True, False,
         environ={"DISABLE_PTXAS_OPT": ("1", "1")}, stock=SAME | NEW),
]  # fmt: skip

DEVICES = [
    compiles("the arch", device=("cuda:90#0", "cuda:80#1")),
    compiles("the arch of one device, by its driver", device=("cuda:90#0", "cuda:80#0"), stock=SAME),
]  # fmt: skip

AMD = [  # an older Triton links for AMD with a program that a machine may not have
    compiles("the arch of another vendor", device=("cuda:90#0", "hip:gfx942#2")),
    compiles("the arch that the environment asks for", device=("hip:gfx942#2", "hip:gfx942#2"),
             environ={"TRITON_OVERRIDE_ARCH": (None, "gfx950")}, stock=SAME),
]  # fmt: skip

_PTXAS = """#!/bin/sh
LEVEL=3
SAYS
exec "$REAL_PTXAS" "$@" -O$LEVEL
"""
_SILENT = _PTXAS.replace("SAYS\n", "")
_SM80 = ("cuda:80#1", "cuda:80#1")  # whose ptxas is named by the same variable under every Triton
_PATH = "{row}/bin/ptxas"
_EDITED = {"edit": ("LEVEL=3", "LEVEL=0"), "edits_live": True}

TOOLS = [
    compiles("a tool's version",
             files={"bin/ptxas": _PTXAS.replace("SAYS", '[ "$1" = --version ] && echo "build $LEVEL"')},
             device=_SM80, environ={"TRITON_PTXAS_PATH": (_PATH, _PATH)}, stock=SAME, **_EDITED),
    compiles("the content of a tool of one version", files={"bin/ptxas": _SILENT},
             device=_SM80, environ={"TRITON_PTXAS_PATH": (_PATH, _PATH)}, stock=SAME | NEW, **_EDITED),
    compiles("which tool the environment names",
             files={"bin/ptxas": _SILENT, "newer/bin/ptxas": _SILENT.replace("LEVEL=3", "LEVEL=0")},
             device=_SM80, environ={"TRITON_PTXAS_PATH": (_PATH, "{row}/newer/bin/ptxas")}, stock=SAME | NEW),
]  # fmt: skip

LINKS = (
    HEAD
    + """
from pathlib import Path

from triton.language import core

LIBRARIES = {"mine": str(Path(__file__).parent / "mine.ll")}
ANSWERS = {(core.dtype("int32"),): ("__nv_mine", core.dtype("int32"))}

@core.extern
def mine(v, _semantic=None):
    return core.extern_elementwise("mine", "", [v], ANSWERS, is_pure=True, _semantic=_semantic)

@triton.jit
def kernel(x):
    tl.store(x, mine(tl.load(x)))  # {what}
"""
)
LIBRARY = """
target datalayout = "e-i64:64-i128:128-v16:16-v32:32-n16:32:64"
target triple = "nvptx64-nvidia-cuda"

define i32 @__nv_mine(i32 %x) {
  %r = add i32 %x, 1
  ret i32 %r
}
"""

_TOUCHED = {"TRITON_DISABLE_LINE_INFO": ("1", "1")}  # else files are looked at every 50 ms

LIBRARIES = [
    Row("the content of a library that the launch links", LINKS, "launch(kernel, extern_libs=LIBRARIES)", ("%x, 1", "%x, 2"),
        files={"mine.ll": LIBRARY}, edits_live=True, environ=_TOUCHED, stock=SAME),
]  # fmt: skip

ROWS = [*ENVIRONMENT, *KNOBS, *DEVICES, *(AMD if hasattr(amd, "link_hsaco") else []), *TOOLS, *LIBRARIES]
