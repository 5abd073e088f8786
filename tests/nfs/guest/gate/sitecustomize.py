"""Python loads this first in the processes of a test on NFS: a gate before `link`, and a clock that is wrong.

While ``hold`` exists in ``$NFS_GATE``, a thread that is about to link a file into the store's objects says so in ``held``, and
waits: so the server can be disturbed in the middle of a publish. ``tried-<digest>`` tells that a link began.
``$NFS_CLOCK``: seconds by which `time.time` is wrong.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

_gate = os.environ.get("NFS_GATE")
_wrong = float(os.environ.get("NFS_CLOCK", "0"))


def _hold(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "os.link":
        return
    source, target = (_path(*named) for named in zip(arguments[:2], arguments[2:], strict=True))
    if "/objects/" not in str(target):
        return
    assert _gate is not None
    hold = Path(_gate, "hold")
    if hold.exists():
        for known in (
            source,
            source.parent,
            target.parent,
        ):  # then only the link itself has to be asked of the server
            os.access(known, os.W_OK | os.X_OK)
        Path(_gate, "held").touch()
    while hold.exists():
        time.sleep(0.002)
    Path(_gate, f"tried-{target.name}").touch()


def _path(name: str | bytes, directory: int) -> Path:
    """`name` is of the open `directory`, unless that is -1."""
    upper = Path() if directory == -1 else Path(f"/proc/self/fd/{directory}").readlink()
    return upper / os.fsdecode(name)


if _gate:
    Path(_gate).mkdir(parents=True, exist_ok=True)
    sys.addaudithook(_hold)

if _wrong:
    right, right_ns = time.time, time.time_ns
    time.time = lambda: right() + _wrong
    time.time_ns = lambda: right_ns() + int(_wrong * 1e9)
