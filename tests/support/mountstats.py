"""The RPCs that this host's kernel has sent to an NFS server."""

from __future__ import annotations

from pathlib import Path


def rpcs(mount: str) -> dict[str, int]:
    """How often each operation was sent since this host mounted `mount`."""
    return sent(Path("/proc/self/mountstats").read_text(), mount)


def sent(mountstats: str, mount: str) -> dict[str, int]:
    """The same, of a host whose mountstats these are."""
    counts: dict[str, int] = {}
    mine = ops = False
    for line in mountstats.splitlines():
        if line.startswith("device "):
            mine, ops = f" mounted on {mount} " in line, False
        elif mine and "per-op statistics" in line:
            ops = True
        elif mine and ops and ":" in line:
            name, _, figures = line.partition(":")
            counts[name.strip()] = int(figures.split()[0])
    return counts
