"""A directory to which many writers add files, and which is read whole: the parts of a profile.

Nothing is locked. Each file is renamed into place, and a file that replaces others is there before they are removed. A listing is
not atomic, though: it may miss the new file, which came behind its position, and the old ones, which were removed ahead of
it. So a reader lists again after it has read all files.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kcoord.files import beneath
from kcoord.files.atomic import LAYOUT, replace_file
from kcoord.files.faults import store_errors

_ATTEMPTS = 5


def paths_of(directory: Path, suffix: str) -> list[Path]:
    """The files there, sorted; none if there is no such directory. Raises OSError."""
    try:
        return sorted(p for p in directory.iterdir() if p.suffix == suffix and not p.name.startswith("."))
    except FileNotFoundError:
        return []


def written_at(path: Path) -> float:
    """Seconds of the file system's clock; 0.0 for a file that is gone: its writer has just replaced it by a larger one."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def read_all(paths: Callable[[], list[Path]], read: Callable[[Path], bool]) -> list[Path] | None:
    """Call ``read(path)``, which returns False if the file is gone, for each of ``paths()``, until two listings agree.

    Returns the files; None if they keep changing, and some may not have been read. Each file is read once. Raises what the
    two raise.
    """
    done: set[Path] = set()
    listing = paths()
    for _ in range(_ATTEMPTS):
        done.update(path for path in listing if path not in done and read(path))
        before, listing = listing, paths()
        if listing == before and done.issuperset(listing):
            return listing
    return None


def save(directory: Path, name: str, content: bytes, earlier: Path | None = None) -> Path:
    """Write `content` as the file `name`, atomically and durably; returns its path. Raises `StoreError`.

    `earlier`, a file whose content this one includes, is removed afterwards, if it is in this directory.
    """
    path = directory / name
    with store_errors(directory):
        root = directory.parents[2] if directory.parents[1].name == LAYOUT else directory.parents[1]  # a user chose it
        root.mkdir(parents=True, exist_ok=True)
        for place in (*reversed(directory.relative_to(root).parents[:-1]), directory.relative_to(root)):
            with suppress(FileExistsError):
                beneath.mkdir(root / place, root)
        replace_file(path, content, root=root, durable=True)
        if earlier is not None and earlier.parent == directory and earlier != path:
            with suppress(FileNotFoundError):
                beneath.unlink(earlier, root)
    return path
