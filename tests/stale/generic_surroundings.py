"""Rows of the generic API: what is neither code nor value of the program. Environment, device, tools, files."""

from __future__ import annotations

from tests.stale.generic_values import HEAD
from tests.stale.row import Row

_IMPORTS = (
    HEAD
    + """
import os
import subprocess
from pathlib import Path

import kcoord
from kcoord.keys.device import current_device

HERE = str(Path(__file__).parent)
"""
)


def writes(what: str, expression: str, choices: str = "", setup: str = "", **more: object) -> Row:
    """A compile function whose output is `expression`, under further `choices` of ``compile_once``."""
    build = (
        f'\n@compile_once({choices})\ndef build(x, *, staging):\n    (staging / "kernel").write_text({expression})\n'
    )
    return Row(what, _IMPORTS + setup + build, "build(3)", **more)  # type: ignore[arg-type]


_FLAG = {"SUBJECT_FLAG": ("1", "2")}

ENVIRONMENT = [
    writes("an environment variable", 'os.environ["SUBJECT_FLAG"]', environ=_FLAG),
    writes("an environment variable that a helper gets", "helper()",
           setup='def helper(): return os.environ.get("SUBJECT_FLAG", "absent")\n', environ=_FLAG),
    writes("an environment variable that was not set", 'os.getenv("SUBJECT_FLAG", "absent")',
           environ={"SUBJECT_FLAG": (None, "2")}),
    writes("an environment variable that is set to nothing", 'os.getenv("SUBJECT_FLAG", "absent")',
           environ={"SUBJECT_FLAG": (None, "")}),
    writes("whether an environment variable is set", 'str("SUBJECT_FLAG" in os.environ)',
           environ={"SUBJECT_FLAG": (None, "2")}),
    writes("an environment variable imported by name", 'environ["SUBJECT_FLAG"] + getenv("SUBJECT_FLAG")',
           setup="from os import environ, getenv\n", environ=_FLAG),
    writes("a declared environment variable", '"".join(os.environ[n] for n in NAMES)',
           'environ=("SUBJECT_FLAG",)', 'NAMES = ["SUBJECT_FLAG"]\n', environ=_FLAG),
    writes("a declared environment variable that a program reads",
           'subprocess.run(["sh", "-c", "echo $SUBJECT_FLAG"], capture_output=True, text=True, check=True).stdout',
           'environ=("SUBJECT_FLAG",)', environ=_FLAG),
]  # fmt: skip

DEVICES = [
    writes("the arch", "str(current_device().target)", device=("cuda:90#0", "cuda:80#0")),
    writes("the arch of the device that is switched to", "str(current_device().target)", device=("cuda:90#0", "cuda:80#1")),
    writes("the ordinal of the device, where it is baked in", "str(current_device())", "scope=kcoord.Scope.DEVICE",
           device=("cuda:90#0", "cuda:90#1")),
]  # fmt: skip

_TOOL = {"bin/mytool": "#!/bin/sh\necho version 1\n"}
_RUN = 'subprocess.run(["mytool"], capture_output=True, text=True, check=True).stdout'
_PATH = "/usr/bin:/bin"
_EDITED = {"edit": ("version 1", "version 2"), "edits_live": True}

TOOLS = [
    writes("a tool's version", _RUN, 'tools=("mytool",)', files=_TOOL,
           environ={"PATH": (f"{{row}}/bin:{_PATH}",) * 2}, **_EDITED),
    writes("which tool of a name is first on PATH", _RUN, 'tools=("mytool",)',
           files=_TOOL | {"newer/bin/mytool": "#!/bin/sh\necho version 2\n"},
           environ={"PATH": (f"{{row}}/bin:{_PATH}", f"{{row}}/newer/bin:{{row}}/bin:{_PATH}")}),
    writes("a tool that appears earlier on PATH", _RUN, 'tools=("mytool",)',
           files=_TOOL, added={"newer/bin/mytool": "#!/bin/sh\necho version 2\n"},
           environ={"PATH": (f"{{row}}/newer/bin:{{row}}/bin:{_PATH}",) * 2}, edits_live=True),
    writes("the content of a tool that is named by its path",
           'subprocess.run([f"{HERE}/bin/mytool"], capture_output=True, text=True, check=True).stdout',
           'tools=(f"{HERE}/bin/mytool",)', files=_TOOL, **_EDITED),
]  # fmt: skip

TREES = [
    writes("a template in a directory", 'Path(HERE, "templates", "deep", "kernel.in").read_text()',
           'trees=(f"{HERE}/templates",)', files={"templates/deep/kernel.in": "version 1\n"}, **_EDITED),
    writes("a file that a directory did not have", 'str(sorted(p.read_text() for p in Path(HERE, "templates").iterdir()))',
           'trees=(f"{HERE}/templates",)', files={"templates/a.in": "version 1\n"},
           added={"templates/b.in": "version 2\n"}, edits_live=True),
]  # fmt: skip

ROWS = [*ENVIRONMENT, *DEVICES, *TOOLS, *TREES]
