"""``python -m kcoord_launch.boot [-m] SCRIPT …``: hook the compilers of this rank, then run SCRIPT as it would run itself."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    """`sys.argv` is ``[boot, "-m" or "-", script or module, arguments…]``."""
    _, kind, target, *arguments = sys.argv
    _hook()
    sys.argv = [target, *arguments]
    if kind == "-m":
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(target).resolve().parent)  # as `python SCRIPT` has it
        runpy.run_path(target, run_name="__main__")


def _hook() -> None:
    from kcoord.backends.base import notices
    from kcoord.backends.install import install
    from kcoord.errors import KcoordError

    try:
        install()
    except KcoordError as error:
        notices.tell(f"{error}; this rank runs without kcoord")


if __name__ == "__main__":
    main()
