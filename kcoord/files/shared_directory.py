"""A directory to which many writers add files, and which is read whole: a profile's parts, or what its jobs needed.

Each file is renamed into place, and what takes the place of others is there before they go; nothing is locked. A listing is not
of one moment, though: who lists meanwhile may see neither the new one, whose place had been passed before it came, nor the old
ones, which went before theirs was reached. So whoever has read them all lists again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kcoord.files.faults import store_error
from kcoord.files.replace import replace_file

_ATTEMPTS = 5


def paths_of(directory: Path, suffix: str) -> list[Path]:
    """The files there, sorted; none if there is no such directory. Raises OSError."""
    try:
        return sorted(p for p in directory.iterdir() if p.suffix == suffix and not p.name.startswith("."))
    except FileNotFoundError:
        return []


def read_all(paths: Callable[[], list[Path]], read: Callable[[Path], bool]) -> list[Path] | None:
    """Call ``read(path)``, which is False if the file is gone, for each of ``paths()``, until all that were there at one moment
    have been read; returns these. None: they change all the time, and some may not have been read.

    A file that was read is not read again. Raises what the two raise.
    """
    done: set[Path] = set()
    there = paths()
    for _ in range(_ATTEMPTS):
        done.update(path for path in there if path not in done and read(path))
        before, there = there, paths()
        if there == before and done.issuperset(there):
            return there
    return None


def save(directory: Path, name: str, content: bytes, earlier: Path | None = None, at: float | None = None) -> Path:
    """Write `content` as the file `name`, atomically and durably; returns its path. Raises `StoreError`.

    `earlier`, a file that holds nothing that this one does not, is removed then, if it is in this directory. `at`: when this one
    counts as written, if not now.
    """
    path = directory / name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        replace_file(path, content, durable=True, at=at)
        if earlier is not None and earlier.parent == directory and earlier != path:
            earlier.unlink(missing_ok=True)
    except OSError as error:
        raise store_error(error, directory) from error
    return path
