"""Names of the profiles of jobs for which nobody named one: by what a job runs.

``auto-<entry>.<ranks>.<content>``: the script's or module's name, the number of ranks, and a digest of the script. A job whose
own profile is not there uses the nearest one: of the same entry, if possible of as many ranks; of several, the latest.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from kcoord.settings import NO_PROFILE

_NAME = re.compile(r"auto-(?P<entry>\w{1,30})\.(?P<ranks>\d{1,7})\.(?P<content>[0-9a-f]{8})")
_OWN = ("kcoord", "kcoord_torchrun", "kcoord_launch")
_OF_ANY_JOB = "ray/_private/workers/default_worker.py"
"""The end of a program's path that runs functions of any job, whose kernels have nothing in common."""
_LARGEST = 1 << 20  # bytes of a script that are looked at
KEPT = 100
"""Automatic profiles that a directory keeps: the latest."""


def automatic_name(entry: str, ranks: int, content: bytes = b"") -> str:
    """The name for `ranks` ranks (0: nobody knows) that run the script or module `entry`."""
    plain = re.sub(r"\W", "_", entry, flags=re.ASCII)[-30:] or "_"
    return f"auto-{plain}.{min(ranks, 9_999_999)}.{hashlib.sha256(content).hexdigest()[:8]}"


def is_automatic(name: str | None) -> bool:
    return name is not None and _NAME.fullmatch(name) is not None


def nearest(name: str, existing: Mapping[str, float]) -> str | None:
    """The profile to read for `name`: itself, or the nearest of `existing`, which maps names to times. None: there is none."""
    if name in existing:
        return name
    wanted = _NAME.fullmatch(name)
    if wanted is None:
        return None
    known = [found for each in existing if (found := _NAME.fullmatch(each)) and found["entry"] == wanted["entry"]]
    ranked = [(found["ranks"] == wanted["ranks"], existing[found[0]], found[0]) for found in known]
    return max(ranked)[2] if ranked else None


def superfluous(existing: Mapping[str, float]) -> list[str]:
    """The automatic profiles of `existing` beyond the latest `KEPT`."""
    return sorted(filter(is_automatic, existing), key=lambda name: (existing[name], name))[:-KEPT]


def of_script(path: str, ranks: int) -> str:
    """The name for the script at `path`; reads it."""
    return automatic_name(Path(path).stem, ranks, _content(path))


def of_module(name: str, ranks: int) -> str:
    """The name for ``python -m name``; reads the module's file if it is below the current directory or on `sys.path`."""
    spec = PathFinder.find_spec(name) if "." not in name else None
    content = _content(spec.origin) if spec is not None and spec.origin else b""
    return automatic_name(name, ranks, content)


def of_command(words: Sequence[str], ranks: int) -> str | None:
    """The name for a launcher's command: by its first script, or its module. None: it names neither."""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word.endswith(".py"):
            return of_script(word, ranks)
        if word == "-m" and following:
            return of_module(following, ranks)
    return None


def of_this_process(ranks: int) -> str:
    """The name for the script or module that this process runs.

    `NO_PROFILE` in a shell, a notebook, a program of kcoord, or a worker of Ray.
    """
    main = sys.modules.get("__main__")
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        entry = str(spec.name).removesuffix(".__main__")
    elif isinstance(file, str):
        entry = Path(file).stem
    else:
        return NO_PROFILE
    if re.sub(r"\W", "_", entry.partition(".")[0]) in _OWN or str(file).endswith(_OF_ANY_JOB):
        return NO_PROFILE
    return automatic_name(entry, ranks, _content(file))


@functools.lru_cache(maxsize=8)
def _content(path: object) -> bytes:
    """The beginning of a file; empty if there is none."""
    try:
        with Path(str(path)).open("rb") as file:
            return file.read(_LARGEST)
    except OSError:
        return b""
