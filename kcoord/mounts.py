"""The file system below a path, by this process's table of mounts, and whether it is this node's own."""

from __future__ import annotations

import mmap
import os
import re
import tempfile
from pathlib import Path

LOCAL = frozenset({
    "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", "fuse.fuse-overlayfs", "aufs", "tmpfs",
    "ramfs",
})  # fmt: skip
"""Types of file systems of one node, or of one container."""
NETWORK = frozenset({
    "nfs", "nfs4", "lustre", "cifs", "smb3", "fuse.sshfs", "gpfs", "beegfs", "ceph", "9p", "virtiofs", "afs",
})  # fmt: skip
"""Types of which several nodes may see the same one."""
_MOUNTS = Path("/proc/self/mountinfo")


def file_system_of(path: Path) -> str:
    """The type of the file system that `path` is on, or would be; ``unknown`` without ``/proc``.

    One that the path's text names is not touched: its server may hang.
    """
    try:
        mounts = [line.split(" ") for line in os.fsdecode(_MOUNTS.read_bytes()).splitlines()]
    except OSError:
        return "unknown"
    kinds = {
        _plain(fields[4]): fields[fields.index("-") + 1] for fields in mounts
    }  # of two at one point the last is seen
    named = _kind(path, kinds)
    return named if named in NETWORK else _kind(Path(os.path.realpath(path)), kinds)


def _kind(path: Path, kinds: dict[str, str]) -> str:
    above = map(str, (path, *path.parents))
    return next((kinds[each] for each in above if each in kinds), "unknown")


def _plain(name: str) -> str:
    """Spaces and the like are escaped, as ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), name)


def flags_of(path: Path) -> int:
    """``statvfs``'s flags at `path`, or at the last directory on the way to it that exists. Raises OSError."""
    while True:
        try:
            return os.statvfs(path).f_flag
        except FileNotFoundError:
            path = path.parent


def try_library(directory: Path) -> None:
    """Write a file in `directory`, and map it as a library is mapped. Raises OSError if the disk refuses either."""
    with tempfile.TemporaryFile(dir=directory) as file:
        file.write(b"\0" * mmap.PAGESIZE)
        file.flush()
        mmap.mmap(file.fileno(), mmap.PAGESIZE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC).close()
