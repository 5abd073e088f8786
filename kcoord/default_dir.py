"""The default directories of this user on this node: of artifacts, and of sockets.

Artifacts lie in ``kcoord`` in the user's cache directory, where compilers have their caches, too: it outlives a job's own
``/tmp``. It must be on a file system of this node's, take a file, and let a library be mapped. Else they lie in
``kcoord-<uid>`` in a temporary directory. The first process decides, and leaves its word there: a disk that fills up later moves
nobody.

Sockets always lie in a temporary directory: containers that share a home have an agent each. It is the first of ``TMPDIR``,
``/tmp`` and ``/var/tmp`` that is suitable: on a machine that others use, too, another user may have taken the name.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kcoord import mounts
from kcoord.interruption import let_through
from kcoord.ownership import doubt_of, make_directory, make_own

_ELSEWHERE = ("/tmp", "/var/tmp")  # where others can replace whatever is in TMPDIR, or TMPDIR is not this node's
_LEAST_ROOM = 64 << 20  # bytes that a disk must have free to be chosen
_log = logging.getLogger("kcoord")


def usual_runtime_dir() -> Path:
    """The directory of sockets, if it is suitable: in the first temporary directory. It is not created."""
    return _temporary()[0] / f"kcoord-{os.getuid()}"


def runtime_directory() -> Path:
    """The directory of sockets, which is created, the same for all processes of this user.

    If no place is suitable, or a disk refuses, it is not: the code that needs the directory reports why.
    """
    return _first_suitable(tuple(place / usual_runtime_dir().name for place in _temporary()))


@functools.lru_cache(maxsize=4)
def _first_suitable(places: tuple[Path, ...]) -> Path:
    taken = ""
    for place in sorted(places, key=lambda place: bool(_why_unsuitable_mount(place))):  # a socket needs no exec
        try:
            why = make_own(place)
        except OSError:
            return place
        if not why:
            if taken:
                told = "kcoord: %s: %s is used instead; set KCOORD_LOCAL_DIR to a directory of your own"
                _log.warning(told, taken, place)
            return place
        taken = taken or why
    return places[0]


def _temporary() -> tuple[Path, ...]:
    first = ""
    with contextlib.suppress(FileNotFoundError):  # none can be written just now
        first = tempfile.gettempdir()  # writes a file into each candidate
    with contextlib.suppress(FileNotFoundError):
        first = "" if first == os.getcwd() else first  # noqa: PTH109 - Python's last resort, which nodes may share
    first = first or os.environ.get("TMPDIR") or "/tmp"
    return tuple(dict.fromkeys(Path(each).absolute() for each in (first, *_ELSEWHERE)))


def cache_directory() -> Path | None:
    """``$XDG_CACHE_HOME/kcoord``, or ``~/.cache/kcoord``; None if this user has no home."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    parent = named if os.path.isabs(named) else os.path.expanduser("~/.cache")  # noqa: PTH111, PTH117 - it may have no home
    return Path(parent, "kcoord") if os.path.isabs(parent) else None  # noqa: PTH117


def local_directory() -> Path:
    """The directory of artifacts, the same for all processes of this user that have this home and temporary directory.

    Creates it. If no place is suitable it is the first temporary directory: the code that needs it reports why.
    """
    runtime, cache = runtime_directory(), cache_directory()
    if cache is None or why_unsuitable(cache):
        return runtime
    word = runtime / f"local-dir-{hashlib.sha256(os.fsencode(cache)).hexdigest()[:8]}"
    with contextlib.suppress(OSError):
        return runtime if word.read_bytes() == os.fsencode(runtime) else cache
    decided = cache if takes_libraries(cache, _LEAST_ROOM) else runtime
    with contextlib.suppress(OSError):  # without a word each process looks for itself
        descriptor, part = tempfile.mkstemp(dir=runtime)
        try:
            os.write(descriptor, os.fsencode(decided))
            with contextlib.suppress(FileExistsError):  # another process was first
                os.link(part, word)
        finally:
            os.close(descriptor)
            os.unlink(part)  # noqa: PTH108
        decided = Path(os.fsdecode(word.read_bytes()))
    return decided if decided == cache else runtime


def why_unsuitable(directory: Path) -> str:
    """Why artifacts must not lie in `directory`, by its mount and its owners, which every process sees alike; empty if they may.

    Not looked at: whether its disk is full.
    """
    try:
        return _why_unsuitable_mount(directory) or (
            f"{directory} is a symbolic link" if directory.is_symlink() else doubt_of(directory)
        )
    except OSError as error:
        return f"{directory}: {error.strerror}"


def _why_unsuitable_mount(directory: Path) -> str:
    kind = mounts.file_system_of(directory)
    if kind not in mounts.LOCAL:
        return f"{directory} is on {kind}"
    try:
        flags = mounts.flags_of(directory)
    except OSError as error:
        return f"{directory}: {error.strerror}"
    if flags & (os.ST_NOEXEC | os.ST_RDONLY):
        return f"{directory} is mounted {'noexec' if flags & os.ST_NOEXEC else 'read-only'}"
    return ""


def why_temporary(local_dir: Path) -> str:
    """Why `local_dir`, the directory of artifacts, is in the temporary directory; empty if it is elsewhere."""
    cache = cache_directory()
    if runtime_directory() not in (local_dir, local_dir.parent):
        return ""
    return (why_unsuitable(cache) or f"{cache} took no file") if cache is not None else "this user has no home"


def takes_libraries(directory: Path, room: int) -> bool:
    """True if `directory`, which is created, has `room` bytes free, takes a file, and lets it be mapped as a library.

    Directories above it are created, too, for this user alone, whatever the umask.
    """
    try:
        make_directory(directory, above=0o700)
        disk = os.statvfs(directory)
        mounts.try_library(directory)
    except OSError as error:
        let_through(error)
        return False
    return disk.f_blocks == 0 or disk.f_bavail * disk.f_frsize >= room  # some file systems report no size


def private_places() -> Iterator[Path]:
    """Directories in which one process may keep what its other directories refuse, best first."""
    yield from _temporary()[:1]
    if (cache := cache_directory()) is not None:
        yield cache.parent
