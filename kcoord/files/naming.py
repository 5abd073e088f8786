"""Names of a layout and of staged files; these state the host, the process and the pid namespace of their owners."""

from __future__ import annotations

import functools
import hashlib
import os
import uuid
from pathlib import Path

LAYOUT = "v2"
"""The directory that holds all of a store but its marker; its name is the version of the layout."""


def staging_name() -> str:
    """A unique name for a staging directory, which states its owner: ``<host>-<pid>-<token>``.

    The token begins with `place`: hosts, and containers of one host, may share a name, and then pids.
    """
    return f"{os.uname().nodename}-{os.getpid()}-{place()}{uuid.uuid4().hex[:12]}"


def place() -> str:
    """Eight hex digits for this boot of this kernel and this pid namespace; within it a pid names one process at a time."""
    return _place(os.getpid())


@functools.lru_cache(maxsize=1)
def _place(pid: int) -> str:
    """`pid`, our own, is the key of the cache: a forked child may be in another namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        namespace = Path("/proc/self/ns/pid").readlink()
    except OSError:
        return uuid.uuid4().hex[:8]  # unique, so that no process judges the owner by its pid
    return hashlib.sha256(f"{boot} {namespace}".encode()).hexdigest()[:8]
