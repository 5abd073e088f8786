"""What runs, looked at from outside. Any of it may end while it is looked at: then it was not there."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

import psutil


def those_within(directory: Path) -> list[psutil.Process]:
    """Everything but this process that runs with its local tier in `directory`, or below it."""
    there = b"\0KCOORD_LOCAL_DIR=" + os.fsencode(directory)
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):
            environ = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
            ours = any(there + end in environ for end in (b"\0", b"/")) and pid != os.getpid()
            if ours and (process := psutil.Process(pid)).status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def agents_of(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Without the commands that run one in a namespace."""
    found = [(process, words_of(process)) for process in processes]
    return [process for process, words in found if "kcoord.agent" in words and words[0] != "unshare"]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line. A forked one's ends with empty words."""
    try:
        return [word for word in process.cmdline() if word]
    except psutil.NoSuchProcess:
        return []


def inodes_open_in(pid: int) -> set[int]:
    """Of its descriptors."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            found.add(descriptor.stat().st_ino)
    return found


def kill(processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
