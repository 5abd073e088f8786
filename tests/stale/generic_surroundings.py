"""Rows of the generic API: what is neither code nor value of the program. Environment, device, tools, files."""

from __future__ import annotations

from collections.abc import Mapping

from tests.stale.generic_values import HEAD
from tests.stale.row import Both, Row

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
_ON_PATH = {"PATH": (f"{{row}}/bin:{_PATH}",) * 2}


def wrapped(
    what: str, body: str, real: str = "bin/realtool", files: Mapping[str, str] | None = None,
    environ: Mapping[str, Both] | None = None,
) -> Row:  # fmt: skip
    """A tool that is a script of `body`. It runs, or reads, the file `real`."""
    files = {"bin/mytool": f"#!/bin/sh\n{body}\n", real: "#!/bin/sh\necho version 1\n", **(files or {})}
    return writes(what, _RUN, 'tools=("mytool",)', files=files, environ={**_ON_PATH, **(environ or {})}, **_EDITED)


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
    wrapped("a program of PATH that a wrapper runs", 'exec realtool "$@"', "real/bin/realtool",
            environ={"PATH": (f"{{row}}/bin:{{row}}/real/bin:{_PATH}",) * 2}),
    wrapped("a program beside the wrapper that runs it", 'exec "$(dirname "$0")/realtool" "$@"'),
    wrapped("a program that a wrapper's variable names", 'HERE=$(cd "$(dirname "$0")" && pwd)\nREAL=$HERE/../real/bin/tool\n'
            'exec "$REAL" "$@"', "real/bin/tool"),
    wrapped("a program that the environment names to a wrapper", 'exec "$REAL_TOOL" "$@"', "real/bin/tool",
            environ={"REAL_TOOL": ("{row}/real/bin/tool",) * 2}),
    wrapped("a program that a wrapper finds by a computed name", 'exec "${0%/*}/real$(echo tool)" "$@"'),
    wrapped("a program that the settings beside a wrapper name", '. "${0%/*}/settings"\nexec "$ROOT/bin/tool" "$@"',
            "real/bin/tool", {"bin/settings": "ROOT=${0%/*}/../real\n"}),
    wrapped("a file that a wrapper reads", 'cat "${0%/*}/flags"', "bin/flags"),
    writes("a variable that a wrapper reads", _RUN, 'tools=(f"{HERE}/bin/mytool",)',
           files={"bin/mytool": '#!/bin/sh\necho "${SUBJECT_FLAG}"\n'}, environ=_FLAG | _ON_PATH),
]  # fmt: skip

TREES = [
    writes("a template in a directory", 'Path(HERE, "templates", "deep", "kernel.in").read_text()',
           'trees=(f"{HERE}/templates",)', files={"templates/deep/kernel.in": "version 1\n"}, **_EDITED),
    writes("a file that a directory did not have", 'str(sorted(p.read_text() for p in Path(HERE, "templates").iterdir()))',
           'trees=(f"{HERE}/templates",)', files={"templates/a.in": "version 1\n"},
           added={"templates/b.in": "version 2\n"}, edits_live=True),
    writes("a file in a hidden directory of a directory", 'Path(HERE, "templates", ".config", "x.in").read_text()',
           'trees=(f"{HERE}/templates",)', files={"templates/.config/x.in": "version 1\n"}, **_EDITED),
]  # fmt: skip

ROWS = [*ENVIRONMENT, *DEVICES, *TOOLS, *TREES]
