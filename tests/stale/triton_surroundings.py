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

DEVICES = [
    compiles("the arch", device=("cuda:90#0", "cuda:80#1")),
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

ROWS = [*ENVIRONMENT, *DEVICES, *(AMD if hasattr(amd, "link_hsaco") else []), *TOOLS]
